"""Tokenizers: bytes, trained ones, files of Hugging Face; streams; chat templates; invalid files."""

import json
import shutil
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from hpcai.errors import ConfigError, DataError, MissingExtraError
from hpcai.models.llm import Tokenizer, chats
from tests.reference_data import DATA, load_json

GOLDEN = DATA / "llm" / "tokenizer"
TEXTS = ["", "plain", "naïve — “½”", "你好 Привет مرحبا", "😀👨‍👩‍👧 ok", "\0\x1f\ufeff\uffff", "a<|endoftext|>b",
         "x = 1234567\n\n\tif y:\n"]  # fmt: skip
CORPUS = [*TEXTS, *(f"for item in range({n * 37}):\n    print(item, {n})\n" for n in range(200))]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(CORPUS, 400)


def changed_copy(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """Return a copy of the golden files after ``change`` of content and settings."""
    shutil.copytree(GOLDEN, folder)
    content, config = (json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    change(content, config)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def metaspace() -> Tokenizer:
    """Return a vocabulary like SentencePiece's: words begin with a space, and rare characters are bytes."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    steps = tokenizers.decoders
    tokenizer.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    special = ["<unk>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["a few plain words, and a few more words"] * 9, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer(json.dumps(content), {"eos_token": "</s>"})


# ---- bytes


def test_byte_ids_equal_those_of_the_tokenizers_library(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load("bytes")
    tokenizer.save(tmp_path)
    reference, loaded = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), Tokenizer.load(tmp_path)
    assert loaded.is_bytes and loaded.identity == tokenizer.identity and loaded.eos == 256
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text
        ids = tokenizer.encode(text, special=True)
        assert ids == reference.encode(text).ids and reference.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("a<|endoftext|>b", special=True) == [97, 256, 98] and tokenizer.encode_document("hi") == [104, 105, 256]
    assert (tokenizer.size, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (257, None, 256, None)
    assert tokenizer.decode([97, 256], skip_special=True) == "a" and tokenizer.byte_lengths.tolist() == [1] * 256 + [0]


def test_bytes_need_no_package_and_errors_of_others_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(with_template(tmp_path / "t", "new {{ messages }}"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    assert Tokenizer.load("bytes").encode_document("é") == [195, 169, 256]
    for call in (lambda: Tokenizer.load(GOLDEN), lambda: Tokenizer.train(["a"], 300), lambda: tokenizer.chat([])):
        with pytest.raises(MissingExtraError, match=r"hpcai-suite\[llm\]"):
            call()


# ---- trained


def test_the_same_texts_train_the_same_tokenizer_and_others_another(trained: Tokenizer) -> None:
    assert trained.size == 400 and trained.eos == 0 and trained.decode([0]) == "<|endoftext|>"
    assert Tokenizer.train(iter(CORPUS), 400).identity == trained.identity
    assert Tokenizer.train(CORPUS[:100], 400).identity != trained.identity != Tokenizer.train(CORPUS, 399).identity
    with pytest.raises(ConfigError, match="256: expected 257 or more"):
        Tokenizer.train(["a"], 256)


def test_decode_inverts_encode_and_no_token_has_more_than_three_digits(trained: Tokenizer) -> None:
    for text in TEXTS:
        assert trained.decode(trained.encode(text)) == text
    assert trained.encode_many(TEXTS) == [trained.encode(text) for text in TEXTS]
    assert 0 not in trained.encode("a<|endoftext|>b") and 0 in trained.encode("a<|endoftext|>b", special=True)
    tokens = [trained.decode([n]) for n in range(trained.size)]
    assert max(len(token) for token in tokens if token.isdigit()) == 3


def test_identity_does_not_depend_on_the_layout_of_the_file(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    assert Tokenizer.load(tmp_path).identity == Tokenizer.load(tmp_path / "tokenizer.json").identity == trained.identity
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]    # as older versions write it
    del content["model"]["ignore_merges"]
    content["truncation"] = {"max_length": 3, "direction": "Right", "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    other = Tokenizer.load(tmp_path)
    assert other.identity == trained.identity and len(other.encode(CORPUS[-1])) > 3
    content["model"]["vocab"]["zzz"] = len(content["model"]["vocab"])
    assert Tokenizer(json.dumps(content)).identity != trained.identity


# ---- streams


@pytest.mark.parametrize("make", [Tokenizer.byte_level, lambda: Tokenizer.load(GOLDEN), metaspace], ids=["bytes", "BPE", "spaces"])
def test_a_stream_decodes_as_all_ids_at_once(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for text in ["a few plain words, and more", "naïve 😀 words — 你好", "a\ufffdb"]:
        stream, ids = tokenizer.stream(), tokenizer.encode(text)
        pieces = [stream.add(token) for token in ids]
        assert all(part == "\ufffd" or "\ufffd" not in part for part in pieces) or "\ufffd" in text
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode()) + (tokenizer._pieces is None), "and a leading space"
    rng = np.random.default_rng(0)
    for _ in range(40 if tokenizer._pieces is not None else 0):       # broken characters in any order
        ids, stream = rng.integers(tokenizer.size, size=30).tolist(), tokenizer.stream(skip_special=True)
        assert "".join([stream.add(token) for token in ids]) + stream.finish() == tokenizer.decode(ids, skip_special=True)


@pytest.mark.parametrize("place", ["added_tokens_decoder", "added_tokens.json", "both"])
def test_added_tokens_of_the_files_beside_are_tokens(tmp_path: Path, place: str) -> None:
    expected = Tokenizer.load(GOLDEN)
    first = expected.size

    def change(content: dict[str, Any], config: dict[str, Any]) -> None:
        if place != "added_tokens.json":
            config["added_tokens_decoder"] = {str(first): {"content": "<|im_start|>", "special": True}}
        config["additional_token"] = "<|im_end|>"
        config["eos_token"] = None

    folder = changed_copy(tmp_path / "t", change)
    added = {"<|im_end|>": first + 1} if place == "both" else {"<|im_start|>": first, "<|im_end|>": first + 1}
    if place != "added_tokens_decoder":
        (folder / "added_tokens.json").write_text("\ufeff" + json.dumps(added))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_start|>"}}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos == first and tokenizer.size == first + (1 if place == "added_tokens_decoder" else 2)
    assert tokenizer.encode("a<|im_start|>b", special=True) == [*expected.encode("a"), first, *expected.encode("b")]
    assert first not in tokenizer.encode("a<|im_start|>b"), "a special token in a text stays plain text"
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").identity == tokenizer.identity != expected.identity


# ---- chats


def with_template(folder: Path, template: Any) -> Path:
    return changed_copy(folder, lambda content, config: config.update(chat_template=template))


def test_templates_are_read_from_a_list_or_a_separate_file(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = Tokenizer.load(with_template(tmp_path / "t", templates))
    assert tokenizer.decode(tokenizer.chat([])[0]) == "yes"
    (tmp_path / "t" / "chat_template.jinja").write_text("a file{% generation %}!{% endgeneration %}")
    tokenizer = Tokenizer.load(tmp_path / "t")
    assert tokenizer.decode(tokenizer.chat([])[0]) == "a file!"
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").chat([]) == tokenizer.chat([])
    with pytest.raises(DataError, match="bytes: has no chat template"):
        Tokenizer.byte_level().chat([])


@pytest.mark.parametrize(("template", "messages", "error"), load_json("refused/chats"))
def test_a_wrong_template_or_message_is_an_error(tmp_path: Path, template: str, messages: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        Tokenizer.load(with_template(tmp_path / "t", template)).chat(messages)


def test_contents_in_parts_null_and_sharegpt_are_rendered_as_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %} calls{% endif %}. {% endfor %}"
    tokenizer = Tokenizer.load(with_template(tmp_path / "t", template))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rendered = tokenizer.decode(tokenizer.chat([
        {"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [1]},
        {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}])[0])  # fmt: skip
    assert rendered == "user: ab. assistant:  calls. user: c. assistant: d. "


TEMPLATES = load_json("llm/chat_templates")


@pytest.mark.parametrize(("name", "messages", "expected"), TEMPLATES["cases"])
def test_answers_are_found_without_generation_blocks(name: str, messages: Any, expected: str) -> None:
    tokenizer = Tokenizer.train(["a few plain words"] * 9, 300, ["<H>", "<E>", "<X>"])
    tokenizer.config |= {"chat_template": (TEMPLATES["templates"] | {"ours": chats.TEMPLATE})[name], "bos_token": "<|endoftext|>"}
    if expected.startswith("error: "):
        with pytest.raises(DataError, match=expected.removeprefix("error: ")):
            tokenizer.chat(messages)
        return
    runs = [(inside, [token for token, _ in run]) for inside, run in groupby(zip(*tokenizer.chat(messages)), lambda pair: pair[1])]
    assert "".join(f"[{tokenizer.decode(run)}]" if inside else tokenizer.decode(run) for inside, run in runs) == expected
    assert {run[-1] for inside, run in runs if inside} == tokenizer.turn_ends
    assert tokenizer.turn_ends == {tokenizer.token_id("<|endoftext|>" if name == "ours" else "<X>")}


# ---- invalid files and ids


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda content, config: config.update(eos_token={"content": "<|none|>"}),
         r"tokenizer_config.json: eos_token '<\|none\|>' is no token of"),
        (lambda content, config: config.update(added_tokens_decoder={"0": {"content": "<|other|>"}}),
         r"tokenizer.json: '.*' has id 0, in the files beside it '<\|other\|>' has 0; fetch"),
        (lambda content, config: config.update(added_tokens_decoder={"999": {"content": "<|other|>"}}),
         r"tokenizer.json: the added token '<\|other\|>' has id 999, the vocabulary makes it"),
        (lambda content, config: config.update(added_tokens_decoder={"x": []}), "expected added tokens in tokenizer_config.json"),
        (lambda content, config: content["model"]["vocab"].update(zzz=1 << 32),
         "tokenizer.json: ids from 0 to 4,294,967,296 .* below 2\\^32"),
        (lambda content, config: content["model"]["vocab"].update(zzz=300), "tokenizer.json: .* and 'zzz' have one id"),
        (lambda content, config: content.pop("model"), "tokenizer.json: not a tokenizer .KeyError: 'model'"),
    ],
)  # fmt: skip
def test_inconsistent_files_raise(tmp_path: Path, change: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        Tokenizer.load(changed_copy(tmp_path / "t", change))


def test_a_file_of_sentencepiece_has_a_hint_whether_it_is_text_or_not(tmp_path: Path) -> None:
    for content in (b"\n\x0eplain", b"\xff"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(DataError, match=r"SentencePiece's .model is another format: save it as tokenizer.json"):
            Tokenizer.load(tmp_path / "tokenizer.model")


def test_unknown_ids_characters_and_a_missing_end_are_errors(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(changed_copy(tmp_path / "t", lambda content, config: config.pop("eos_token")))
    with pytest.raises(DataError, match="names no token that ends a text; give tokenizer_config.json"):
        tokenizer.encode_document("a")
    for kind in (tokenizer, Tokenizer.byte_level()):
        for ids in ([kind.size], [-1]):
            with pytest.raises(DataError, match=f"no token has the id {ids[0]}; they go from 0 to {kind.size - 1}"):
                kind.decode(ids)
        with pytest.raises(DataError, match="character 2 is half a surrogate pair"):
            kind.encode("a\ud800")
