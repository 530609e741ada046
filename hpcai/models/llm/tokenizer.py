"""Text as numbers: the tokenizers of Hugging Face's files, one that is trained here, or plain bytes, which need no package.

    tokenizer.json             what decides ids
    tokenizer_config.json      which tokens begin, end and fill a text, and the template of chats (or chat_template.jinja)
"""

import codecs
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.errors import ConfigError, DataError, HpcaiError
from hpcai.lazy import import_optional
from hpcai.models.llm.chats import render

BYTES = "bytes"
END = "<|endoftext|>"
CONTENT, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# The words of cl100k and Llama 3: contractions, letters with what stands before them, up to three digits, signs, white space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_UNUSED = 1 << 16  # ids that may be unused, besides as many as are used
_UNKNOWN = "�"


def _byte_characters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it can be seen, others from U+0100 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTE = {letter: byte for byte, letter in enumerate(BYTE_CHARACTERS)}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _byte_tokenizer_json() -> dict[str, Any]:
    """``tokenizer.json`` of 256 bytes and the end of a text, which other readers of such files take as well."""
    end = {"id": 256, "content": END, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {letter: byte for byte, letter in enumerate(BYTE_CHARACTERS)}, "merges": [],
    }  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
            "pre_tokenizer": _BYTE_LEVEL, "post_processor": None, "decoder": _BYTE_LEVEL, "model": model}  # fmt: skip


class Tokenizer:
    """Text to ids and back. ``load``, ``train`` and ``of_bytes`` make one.

    ``size`` is one more than the greatest id. ``bos``, ``eos`` and ``pad`` are ids, or None where the files name none. ``before``
    and ``after`` are the ids that its files put around a text. ``identity`` is the SHA-256 of what decides ids, however the file is
    laid out: the same for two tokenizers whose ids mean the same. ``widths`` are the UTF-8 bytes that each id says, 0 for special
    tokens.   [size] int32
    """

    def __init__(self, content: str, config: Mapping[str, Any] | None = None, where: str = CONTENT) -> None:
        """``content`` is the text of a tokenizer.json; ``where`` names it in errors. Raises DataError for what is none."""
        self._text, self.config, self.where = content, dict(config or {}), where
        parsed = _parsed(content, where)
        try:
            self._parse(parsed)
        except HpcaiError:
            raise
        except Exception as problem:  # fields of any type where others are expected
            text = f"{where}: not a tokenizer ({type(problem).__name__}: {str(problem)[:200]})"
            raise DataError(f"{text}; expected tokenizer.json as Hugging Face writes it") from problem

    def _parse(self, content: dict[str, Any]) -> None:
        self.identity = _identity(content)
        self._added: dict[int, dict[str, Any]] = {int(token["id"]): token for token in content.get("added_tokens") or ()}
        self._backends: dict[bool, Any] = {}
        _check_ids(content["model"]["vocab"], self._added, self.where)
        self.is_bytes = self.identity == _BYTES_IDENTITY
        vocabulary = content["model"]["vocab"] if self.is_bytes else self._backend().get_vocab(with_added_tokens=True)
        self._ids: dict[str, int] = {**vocabulary, **{token["content"]: number for number, token in self._added.items()}}
        self.size = max(self._ids.values()) + 1
        self.special = {number for number, token in self._added.items() if token.get("special")}
        self.bos, self.eos, self.pad = (self._special_id(f"{name}_token") for name in ("bos", "eos", "pad"))
        self.prefix, self.suffix = ([], []) if self.is_bytes else self._prefix_suffix()
        decoder = content.get("decoder") or {}
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        self._is_byte_level = [step.get("type") for step in steps] == ["ByteLevel"]

    # ---- where from

    @classmethod
    def load(cls, source: str | Path) -> "Tokenizer":
        """From tokenizer.json, the folder that holds it, or the word "bytes". Raises DataError, which names the file."""
        if str(source) == BYTES:
            return cls.byte_level()
        path = Path(source)
        path = path / CONTENT if path.is_dir() else path
        text, settings, template = (_read(path), path.with_name(CONFIG), path.with_name(TEMPLATE))
        config = _parsed(_read(settings), str(settings)) if settings.is_file() else {}
        if template.is_file():
            config["chat_template"] = _read(template)
        return cls(text, config, str(path))

    @classmethod
    def byte_level(cls) -> "Tokenizer":
        """Each byte of UTF-8 is a token, and id 256 is the end of a text."""
        return cls(json.dumps(_byte_tokenizer_json(), ensure_ascii=False), {"eos_token": END}, BYTES)

    @classmethod
    def train(cls, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> "Tokenizer":
        """Byte-level BPE of at most ``size`` tokens: the end of a text (id 0), further ``special`` tokens, 256 bytes, and the pairs
        that are most frequent in ``texts``, within the words of Llama 3. The same texts give the same tokenizer.

        Raises ConfigError for a size without room for the bytes, DataError for texts that are none.
        """
        least = 257 + len(special)
        if size < least:
            raise ConfigError(f"a vocabulary of {size}: expected {least} or more, for 256 bytes and {least - 256} special tokens")
        library = import_optional("tokenizers", "training a tokenizer needs", "llm")
        steps = library.pre_tokenizers
        made = library.Tokenizer(library.models.BPE())
        level = steps.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = steps.Sequence([steps.Split(library.Regex(SPLIT_PATTERN), "isolated"), level])
        made.decoder = library.decoders.ByteLevel(add_prefix_space=False, use_regex=False)
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END, *special], initial_alphabet=BYTE_CHARACTERS, show_progress=False
        )
        _call_library(lambda: made.train_from_iterator(texts, trainer), "training a tokenizer")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
        return cls(made.to_str(pretty=True), config, "trained tokenizer")

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, with the template of chats in the latter."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        # Who finds the second finds the first, also while several processes write both.
        for name, text in ((CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n"), (CONTENT, self._text)):
            partial = folder / f".{name}.{uuid.uuid4().hex}.partial"
            partial.write_text(text, encoding="utf-8", newline="")
            partial.replace(folder / name)

    # ---- text to ids

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, with nothing before or after. A special token that is written in it is plain text, unless ``special``
        says that it counts. Raises DataError for half a surrogate pair, which no UTF-8 has."""
        return self.encode_many([text], special)[0]

    def encode_many(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        if self.is_bytes:
            return [self._bytes(text, special) for text in texts]
        made = self._backend(special)
        try:
            found = _call_library(lambda: made.encode_batch_fast(list(texts), add_special_tokens=False), self.where)
        except DataError:
            for text in texts:
                _utf8(text)
            raise
        return [each.ids for each in found]

    def encode_document(self, text: str) -> list[int]:
        """The ids of a text that stands alone, with what its files put around it, and an end in any case."""
        return self.add_prefix_suffix(self.encode(text))

    def add_prefix_suffix(self, ids: list[int]) -> list[int]:
        return [*self.prefix, *ids, *self.end_tokens]

    @cached_property
    def end_tokens(self) -> list[int]:
        """What stands behind a text. Raises DataError where the files name no end."""
        if self.suffix and self.eos in (None, self.suffix[-1]):
            return self.suffix
        if self.eos is None:
            raise DataError(f"{self.where}: names no token that ends a text; give {CONFIG} beside it an \"eos_token\"")
        return [*self.suffix, self.eos]

    def token_id(self, token: str) -> int:
        """The id of a token by its name. Raises DataError where there is none."""
        if token not in self._ids:
            raise DataError(f"{self.where}: has no token {token!r}")
        return self._ids[token]

    # ---- ids to text

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Raises DataError for an id that it does not have."""
        found = self._checked(ids, skip_special)
        if self._pieces is not None:
            pieces = self._pieces
            return b"".join([pieces[each] for each in found]).decode("utf-8", "replace")
        return str(_call_library(lambda: self._backend().decode(found, skip_special_tokens=False), self.where))

    def stream(self, skip_special: bool = False) -> "DecodeStream":
        return DecodeStream(self, skip_special)

    def _checked(self, ids: Iterable[int], skip_special: bool) -> list[int]:
        found = [int(each) for each in ids]
        for each in found:
            if not 0 <= each < self.size:
                raise DataError(f"{self.where}: no token has the id {each}; they go from 0 to {self.size - 1}")
        return [each for each in found if each not in self.special] if skip_special else found

    @cached_property
    def _pieces(self) -> list[bytes] | None:
        """The bytes of each id, or None where a decoder does more than put bytes one after the other."""
        if not self._is_byte_level:
            return None
        pieces = [b""] * self.size
        for token, number in self._ids.items():
            plain = number in self._added or any(letter not in _BYTE for letter in token)
            pieces[number] = token.encode() if plain else bytes(_BYTE[letter] for letter in token)
        return pieces

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        if self._pieces is not None:
            found = np.array([len(piece) for piece in self._pieces], np.int32)
        else:
            # What a token says may depend on whether it begins the text.
            anchor, made = self._ids.get("a", next(iter(self._ids.values()))), self._backend()
            texts = made.decode_batch([[anchor], *([anchor, number] for number in range(self.size))], skip_special_tokens=False)
            begin = len(texts[0].encode())
            found = np.array([max(len(text.encode()) - begin, 0) for text in texts[1:]], np.int32)
            for token, number in self._ids.items():
                if re.fullmatch("<0x[0-9A-F]{2}>", token):
                    found[number] = 1
        found[[*self.special]] = 0
        return found

    # ---- chats

    def chat(self, messages: Sequence[Mapping[str, Any]], generation: bool = False) -> tuple[list[int], list[int]]:
        """The ids of a conversation ({"role": ..., "content": ...} each) by the template of the files, and a mask that is 1 where
        the assistant speaks, which the template tells by ``generation`` blocks. With ``generation`` the assistant is to go on.
        Special tokens that are written in a message mean nothing.

        Raises DataError where there is no template, and with its words where it refuses the messages.
        """
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {each.get("name"): each.get("template") for each in template}.get("default")
        if not isinstance(template, str):
            raise DataError(f"{self.where}: has no template of chats; give {CONFIG} beside it a \"chat_template\"")
        names = {key: _token_text(value) for key, value in self.config.items() if key.endswith("_token")}
        words = {key: value for key, value in names.items() if value is not None}
        special = [self._added[number]["content"] for number in self.special]
        told = render(template, self.where, messages, special, add_generation_prompt=generation, tools=None, **words)
        ids, mask, spans = list[int](), list[int](), sorted(told.answers)
        for begin, found, offsets in self._segments(told.text, told.literal):
            part = [0] * len(found)
            for first, last in spans:
                inside = [n for n, (a, b) in enumerate(offsets) if a < b and begin + a < last and begin + b > first]
                if inside:
                    part[inside[0] : inside[-1] + 1] = [1] * (inside[-1] + 1 - inside[0])
            ids += found
            mask += part
        return ids, mask

    @property
    def has_generation_blocks(self) -> bool:
        """Whether the template of chats tells what the assistant says."""
        return bool(re.search(r"\{%[-+]?\s*generation\b", json.dumps(self.config.get("chat_template", ""), ensure_ascii=False)))

    def _segments(self, text: str, literal: set[int]) -> Iterator[tuple[int, list[int], list[tuple[int, int]]]]:
        """Place, ids and their characters of each part of a text whose special tokens count, but those at ``literal``."""
        if not literal:
            found = _call_library(lambda: self._backend(True).encode(text, add_special_tokens=False), self.where)
            yield 0, found.ids, found.offsets
            return
        at = 0

        def plain(begin: int, end: int) -> Iterator[tuple[int, list[int], list[tuple[int, int]]]]:
            found = _call_library(lambda: self._backend().encode(text[begin:end], add_special_tokens=False), self.where)
            yield begin, found.ids, found.offsets

        for match in self._pattern.finditer(text):
            group = match.lastindex or 0
            if match.start(group) not in literal:
                yield from plain(at, match.start())
                yield match.start(), [self.token_id(match[group])], [(0, match.end() - match.start())]
                at = match.end()
        yield from plain(at, len(text))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Special tokens, the longest first, with the white space that some swallow."""
        tokens = sorted((self._added[number] for number in self.special), key=lambda token: -len(token["content"]))
        sides = (r"\s*" if token.get(side) else "" for token in tokens for side in ("lstrip", "rstrip"))
        return re.compile("|".join(f"{next(sides)}({re.escape(token['content'])}){next(sides)}" for token in tokens) or r"(?!)")

    # ---- the library

    def _backend(self, special: bool = False) -> Any:
        if special not in self._backends:
            library = import_optional("tokenizers", "tokenizers other than bytes need", "llm")
            made = _call_library(lambda: library.Tokenizer.from_str(self._text), self.where)
            made.no_truncation()  # some published files cut texts
            made.no_padding()
            made.encode_special_tokens = not special
            self._backends[special] = made
        return self._backends[special]

    def _prefix_suffix(self) -> tuple[list[int], list[int]]:
        """Ids that the file puts before and after a text."""
        found = _call_library(lambda: self._backend().encode("a", add_special_tokens=True), self.where)
        mask = [*found.special_tokens_mask, 1]
        first = mask.index(0) if 0 in mask else 0
        last = len(mask) - 1 - mask[::-1].index(0) if 0 in mask else len(mask) - 2
        return list(found.ids[:first]), list(found.ids[last + 1 :])

    def _special_id(self, key: str) -> int | None:
        token = _token_text(self.config.get(key))
        if token is not None and token not in self._ids:
            raise DataError(f"{Path(self.where).with_name(CONFIG)}: {key} {token!r} is no token of {self.where}; mend one of them")
        return None if token is None else self._ids[token]

    @staticmethod
    def _bytes(text: str, special: bool) -> list[int]:
        if not special:
            return list(_utf8(text))
        first, *others = text.split(END)
        return [*_utf8(first), *(number for part in others for number in (256, *_utf8(part)))]


class DecodeStream:
    """Text from ids that come one by one. A character is told when it is whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._emitted = 0  # of these, whose text was told

    def add(self, token: int) -> str:
        """The text that ``token`` makes whole, perhaps none."""
        tokenizer = self._tokenizer
        if tokenizer._pieces is not None:
            return "".join(self._decoder.decode(tokenizer._pieces[each]) for each in tokenizer._checked([token], self._skip))
        self._ids += tokenizer._checked([token], self._skip)
        before, text = tokenizer.decode(self._ids[: self._emitted]), tokenizer.decode(self._ids)
        if len(text) <= len(before) or text.endswith(_UNKNOWN):
            return ""
        # What was told last stays, for a token may mean another text at the beginning.
        self._ids, self._emitted = self._ids[self._emitted :], len(self._ids) - self._emitted
        return text[len(before) :]

    def finish(self) -> str:
        """What is left when no more ids come: U+FFFD for a character that is not whole."""
        if self._tokenizer._pieces is not None:
            return self._decoder.decode(b"", True)
        before, text = self._tokenizer.decode(self._ids[: self._emitted]), self._tokenizer.decode(self._ids)
        self._ids, self._emitted = [], 0
        return text[len(before) :]


# ---- files


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as problem:
        expected = f"expected {CONTENT}, a folder that holds it, or the word {BYTES}"
        raise DataError(f"{path}: cannot be read ({problem.strerror}); {expected}") from problem
    except UnicodeDecodeError as problem:
        hint = "; SentencePiece's .model is another format: save it as tokenizer.json first" if path.suffix == ".model" else ""
        raise DataError(f"{path}: not text ({problem.reason} at byte {problem.start}), expected JSON{hint}") from problem


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where}: not JSON ({problem}); expected it as Hugging Face writes it; fetch it again") from problem
    if not isinstance(found, dict):
        raise DataError(f"{where}: a JSON {type(found).__name__}, expected an object as Hugging Face writes it")
    return found


def _identity(content: Mapping[str, Any]) -> str:
    """SHA-256 of what decides ids. Versions of the library write merges and fields that are off differently."""
    model = dict(content["model"])
    if model.get("merges"):
        model["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in model["merges"]]
    parts = {name: content.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer")}
    text = json.dumps(_drop_unset({**parts, "model": model}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _drop_unset(value: Any) -> Any:
    """Without the entries that are off."""
    if isinstance(value, dict):
        return {key: _drop_unset(each) for key, each in value.items() if each is not None and each is not False and each != ""}
    return [_drop_unset(each) for each in value] if isinstance(value, list) else value


def _check_ids(vocabulary: Mapping[str, int] | Sequence[Any], added: Iterable[int], where: str) -> None:
    ids = [*(vocabulary.values() if isinstance(vocabulary, Mapping) else range(len(vocabulary))), *added]
    if not ids:
        raise DataError(f"{where}: has no tokens; fetch it again")
    if min(ids) < 0 or max(ids) >= min(2 * len(ids) + _MAX_UNUSED, 1 << 32):
        found = f"ids from {min(ids):,} to {max(ids):,} for {len(ids):,} tokens"
        raise DataError(f"{where}: {found}, expected them from 0 on with few gaps, below 2^32; fetch it again")


def _token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json, which is its text, or an object that has it."""
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise DataError(f"text: character {problem.start + 1} is half a surrogate pair, which is no text") from problem


def _call_library(call: Callable[[], Any], where: str) -> Any:
    """What ``call`` to the library returns. Its errors have no class of their own, and its panics are no Exception."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError, HpcaiError):
        raise
    except BaseException as problem:
        text = f"{where}: {type(problem).__name__}: {str(problem)[:200]}"
        raise DataError(f"{text}; expected a tokenizer as Hugging Face writes it") from problem


_BYTES_IDENTITY = _identity(_byte_tokenizer_json())
