"""Token ids, decoded texts, chats and assistant masks are those of transformers."""

from typing import Any

import pytest

from hpcai.errors import DataError
from hpcai.models.llm import Tokenizer
from tests.reference_data import DATA, load_json

FOLDER = DATA / "llm" / "tokenizer"
STRINGS, CHATS = load_json("llm/tokenizer/strings"), load_json("llm/tokenizer/chats")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.mark.parametrize("case", STRINGS["strings"], ids=lambda case: repr(case["text"][:12]))
def test_texts_have_the_ids_of_the_reference_and_are_decoded(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    ids = tokenizer.encode(case["text"], special=True)
    assert ids == case["ids_without_specials"] and tokenizer.prefix + ids == case["ids"]
    assert tokenizer.decode(ids) == case["decoded"]
    assert tokenizer.decode(case["ids"], skip_special=True) == case["decoded_skip_special"]
    plain = tokenizer.encode(case["text"])
    assert tokenizer.special.isdisjoint(plain) and tokenizer.decode(plain, skip_special=True) == case["text"]


def test_a_character_is_decoded_when_it_is_complete(tokenizer: Tokenizer) -> None:
    case = STRINGS["partial_utf8"]
    stream = tokenizer.stream()
    assert [stream.add(token) for token in case["ids"]] == ["", "", "", case["decoded_prefixes"][-1]] and stream.finish() == ""


@pytest.mark.parametrize("case", CHATS["chats"], ids=range(len(CHATS["chats"])))
def test_chats_have_the_ids_and_the_mask_of_the_reference(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    ids, mask = tokenizer.chat(case["messages"])
    assert ids == case["ids_sanitized"] and len(mask) == len(ids)
    assert tokenizer.decode(ids) == case["text"]
    answers = [token for token, inside in zip(ids, mask) if inside]
    assert answers == [token for token, inside in zip(case["ids"], case["assistant_mask"]) if inside]
    if ids == case["ids"]:
        assert mask == case["assistant_mask"]
        assert tokenizer.chat(case["messages"], generation=True)[0] == case["ids_generation_prompt"]


@pytest.mark.parametrize("case", CHATS["errors"], ids=lambda case: case["error"])
def test_a_chat_that_the_template_rejects_is_an_error_with_its_message(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=case["error"]):
        tokenizer.chat(case["messages"])
