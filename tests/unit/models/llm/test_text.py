"""Generated text: pieces of complete characters, stop strings, chats, and the tokenizer in the folder of the weights."""

import json
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.errors import ConfigError, DataError
from hpcai.models.llm import LLM, Engine, LLMConfig, Tokenizer, load_deferred, text
from hpcai.models.llm.load import read_settings
from hpcai.models.llm.text import TextStreamer
from hpcai.nn.deferred_init import deferred, materialize
from tests.reference_data import DATA

GOLDEN = DATA / "llm" / "tokenizer"
TEXT = "Zwölf Boxkämpfer — 😀👨‍👩‍👧 jagen\n\nViktor: quer über"
SIZES: dict[str, Any] = {"vocabulary": 300, "width": 16, "layers": 2, "heads": 2, "inner": 24, "positions": 64}


@cache
def trained() -> Tokenizer:
    return Tokenizer.train([TEXT, "jagen\n\n" * 50, "Viktor quer" * 50], 290)


def new_model(tokenizer: Tokenizer | None = None, **sizes: Any) -> LLM:
    torch.manual_seed(1)
    model = LLM(LLMConfig(**SIZES | sizes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    if tokenizer is not None:
        model.tokenizer = tokenizer
    return model


class Scripted:
    """A generation that yields the tokens of ``texts``, each with its end."""

    def __init__(self, *texts: list[int]) -> None:
        self.texts, self.ended, self.steps = texts, [False] * len(texts), 0

    def __iter__(self) -> Iterator[list[int | None]]:
        for row in zip_longest(*self.texts):
            if all(self.ended):
                return
            self.steps += 1
            yield [None if ended else token for ended, token in zip(self.ended, row)]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def script(*texts: list[int]) -> Scripted:
        generation = Scripted(*texts)
        monkeypatch.setattr(text, "generate", lambda *args, **kwargs: generation)
        return generation

    return script


# ---- pieces


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_pieces_are_complete_characters_and_join_to_the_text(kind: str, scripted: Any) -> None:
    tokenizer = Tokenizer.byte_level() if kind == "bytes" else trained()
    assert tokenizer.eos is not None
    scripted([*tokenizer.encode(TEXT), tokenizer.eos])
    text = new_model(tokenizer).generate("a")
    pieces = list(text)
    assert "".join(pieces) == TEXT == str(text) == repr(text) and all(pieces) and len(pieces) > 20
    assert all("\ufffd" not in piece for piece in pieces)
    scripted([*"ab½".encode()][:-1])  # the last character is incomplete
    assert list(new_model(Tokenizer.byte_level()).generate("a")) == ["a", "b", "\ufffd"]


@pytest.mark.parametrize("stop", [["\n\n"], ["n\n\nV"], ["😀👨"], [TEXT], ["quer", "Viktor", "nowhere"]])
def test_a_text_ends_before_the_first_stop_wherever_tokens_end(stop: list[str], scripted: Any) -> None:
    expected = min((TEXT.split(each)[0] for each in stop), key=len)
    for tokenizer in (Tokenizer.byte_level(), trained()):
        ids = tokenizer.encode(TEXT)
        generation = scripted(ids)
        assert "".join(new_model(tokenizer).generate("a", stop=stop)) == expected
        assert generation.steps == next(n for n in range(len(ids) + 1) if any(each in tokenizer.decode(ids[:n]) for each in stop))


def test_a_partial_stop_is_held_back_until_it_differs() -> None:
    streamer = TextStreamer(Tokenizer.byte_level(), {256}, ["aab", "ac"])
    assert [streamer.add(ord(letter)) for letter in "xaaax"] == ["x", "", "", "a", "aax"]
    assert streamer.add(ord("a")) == "" and streamer.finish() == "a"
    overlapping = TextStreamer(Tokenizer.byte_level(), {256}, ["b", "ab"])
    assert overlapping.add(ord("a")) + overlapping.add(ord("b")) == "", "of two stops with the same end, the longer"
    other = TextStreamer(Tokenizer.byte_level(), {ord("z")}, [])
    assert other.add(ord("a")) == "a" and other.add(ord("z")) == "", "also an end token that is not special"


def test_texts_of_a_list_end_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts, steps = ([*b"one.two"], [*b"three", 256], [*b"four.", 256]), list[int]()

    def sample(engine: Engine, rows: Any, logits: torch.Tensor) -> torch.Tensor:
        steps.append(len(rows))
        tokens = [scripts[request.name][len(request.output)] for request, _ in rows]
        return torch.tensor([tokens, [0.0] * len(tokens)], dtype=torch.float64)

    monkeypatch.setattr(Engine, "_sample", sample)
    assert new_model(Tokenizer.byte_level()).generate(["a", "b", "c"], stop=".") == ["one", "three", "four"]
    assert steps == [3, 3, 3, 3, 2, 1]
    assert new_model(Tokenizer.byte_level()).generate([]) == []
    with pytest.raises(ConfigError, match="stop: an empty string"):
        new_model(Tokenizer.byte_level()).generate("a", stop=["x", ""])


# ---- a real model


def test_single_batched_and_token_generation_agree() -> None:
    model = new_model(Tokenizer.byte_level())
    cfg: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "most": 30, "seed": 3}
    alone = str(model.generate("ab", **cfg))
    assert len(alone) > 5 and model.generate(["ab", "abc"], **cfg)[0] == alone != str(model.generate("ab", **cfg | {"seed": 4}))
    ids = text.generate(model, [[256, *b"ab"]], text.SamplingConfig(most=30), [256], vocab_size=257)
    assert str(model.generate("ab", most=30)) == bytes(t for (t,) in ids if t is not None and t < 256).decode("utf-8", "replace")


def test_a_text_begins_with_start_tokens() -> None:
    model, golden = new_model(Tokenizer.byte_level()), Tokenizer.load(GOLDEN)
    assert text.prompt_tokens(model, "") == [256] and text.prompt_tokens(model, "a") == [256, 97]
    assert text.start_tokens(golden) == (golden.prefix or [golden.bos])
    with pytest.raises(DataError, match=r"prompt 0 has 65 tokens, the model 64 positions in all"):
        model.generate("a" * 64)


def test_a_chat_is_rendered_by_the_template(scripted: Any) -> None:
    tokenizer = Tokenizer.load(GOLDEN)
    model, messages = new_model(tokenizer, vocabulary=tokenizer.size + 3), [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.chat(messages, True)[0]
    rows = text.generate(model, [prompt], text.SamplingConfig(most=9), [tokenizer.eos], vocab_size=tokenizer.size)
    ids = [token for (token,) in rows if token is not None and token != tokenizer.eos]
    assert str(model.chat(messages, most=9)) == tokenizer.decode(ids, skip_special=True) == model.chat([messages], most=9)[0]
    scripted([*tokenizer.encode("Hi"), tokenizer.token_id("<|end|>"), *tokenizer.encode("!")])
    assert str(model.chat(messages)) == "Hi!"  # without special tokens
    with pytest.raises(DataError, match="has no chat template"):
        new_model(Tokenizer.byte_level()).chat(messages)


def test_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    new_model().save(tmp_path / "model.safetensors")
    Tokenizer.byte_level().save(tmp_path)
    for config, expected in (({"eos_token_id": [5, 256]}, {5, 256}), ({"eos_token_id": 7}, {7, 256}), ({}, {256})):
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        assert text.stop_tokens(LLM.load(tmp_path)) == expected


# ---- the tokenizer of a model


def test_the_folder_of_a_run_loads_as_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    model = new_model(tied=True, rotary=None, norm="layer", feed="gelu", bias=True)
    model.save(tmp_path / "model.safetensors")
    loaded = LLM.load(tmp_path)
    assert loaded.cfg == model.cfg == read_settings(tmp_path)
    with pytest.raises(DataError, match=f"{tmp_path}: holds no tokenizer.json, .*set model.tokenizer = Tokenizer.load"):
        loaded.generate("a")
    trained().save(tmp_path)
    with deferred():
        lazy = LLM(read_settings(tmp_path))
    materialize(load_deferred(lazy, tmp_path), "cpu")
    assert lazy.tokenizer.identity == trained().identity and lazy.lm_head.weight is lazy.model.embed_tokens.weight
    assert str(lazy.eval().generate("ab", most=9)) == str(LLM.load(tmp_path / "model.safetensors").generate("ab", most=9))


def test_missing_and_mismatched_tokenizers_raise() -> None:
    model = new_model(vocabulary=256)
    with pytest.raises(DataError, match="was not loaded from a folder, so the model has no tokenizer; set model.tokenizer"):
        model.generate("a")
    with pytest.raises(DataError, match="bytes: has ids up to 256, the model's vocabulary 256 entries; it is of another model"):
        model.tokenizer = Tokenizer.byte_level()
