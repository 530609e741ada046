"""Tokenizers in the files of Hugging Face, read or trained, and a tokenizer of bytes, which needs no package.

    tokenizer.json             the vocabulary, and all else that determines ids
    tokenizer_config.json      beginning-of-text, end-of-text and padding tokens, and the chat template (or chat_template.jinja)
"""

import codecs
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.errors import ConfigError, DataError, HpcaiError
from hpcai.json_file import check_fields, parse_object, read_regular
from hpcai.lazy import import_optional
from hpcai.models.llm.chats import Rendered, render

BYTES = "bytes"
END = "<|endoftext|>"
CONTENT, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
ADDED, SPECIAL = "added_tokens.json", "special_tokens_map.json"
# Pre-tokenization of cl100k and Llama 3: contractions, letters with a preceding sign, up to three digits, signs, white space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_UNUSED = 1 << 16  # unused ids allowed, besides as many as are used
_UNKNOWN = "�"
_SENTENCEPIECE = "; SentencePiece's .model is another format: save it as tokenizer.json first"
_BYTE_TOKENIZER = json.loads(Path(__file__).with_name("byte_tokenizer.json").read_text(encoding="utf-8"))
"""tokenizer.json of 256 bytes and an end-of-text token, valid for other readers of such files"""
_BYTE: dict[str, int] = _BYTE_TOKENIZER["model"]["vocab"]
"""The byte of each character of byte-level vocabularies: a byte is itself if it is printable, else a character from U+0100 on."""
BYTE_CHARACTERS = list(_BYTE)


class Tokenizer:
    """A tokenizer, constructed by ``load``, ``train`` or ``byte_level``.

    Attributes:
        size: The largest id plus one.
        bos, eos, pad: Ids, or None if the files name none.
        prefix, suffix: Ids that the files add before and after a text.
        identity: SHA-256 of all that determines ids, whatever the layout of the file.
        byte_lengths: UTF-8 bytes of each id, 0 for special tokens. [size] int32
    """

    def __init__(self, content: str, config: Mapping[str, Any] | None = None, where: str = CONTENT) -> None:
        """Parse ``content``, the text of tokenizer.json; ``where`` names it in errors. Raises DataError if it is invalid."""
        self._text, self.config, self.where = content, dict(config or {}), where
        parsed = _parsed(content, where)
        try:
            self._parse(parsed)
        except HpcaiError:
            raise
        except Exception as problem:  # fields may have any type
            text = f"{where}: not a tokenizer ({type(problem).__name__}: {str(problem)[:200]})"
            raise DataError(f"{text}; expected tokenizer.json as Hugging Face writes it") from problem

    def _parse(self, content: dict[str, Any]) -> None:
        self.identity = _identity(content)
        self._added: dict[int, dict[str, Any]] = {int(token["id"]): token for token in content.get("added_tokens") or ()}
        self._backends: dict[bool, Any] = {}
        vocabulary = content["model"]["vocab"]
        ids = [*(vocabulary.values() if isinstance(vocabulary, Mapping) else range(len(vocabulary))), *self._added]
        if not ids:
            raise DataError(f"{self.where}: has no tokens; fetch it again")
        if min(ids) < 0 or max(ids) >= min(2 * len(ids) + _MAX_UNUSED, 1 << 32):
            actual = f"ids from {min(ids):,} to {max(ids):,} for {len(ids):,} tokens"
            raise DataError(f"{self.where}: {actual}, expected them from 0 on with few gaps, below 2^32; fetch it again")
        self.is_bytes = self.identity == _BYTES_IDENTITY
        if not self.is_bytes:
            vocabulary = self._backend().get_vocab(with_added_tokens=True)
        for number, token in self._added.items():
            if not self.is_bytes and (actual := vocabulary.get(token["content"])) != number:
                text = f"the added token {token['content']!r} has id {number:,}, the vocabulary makes it {actual}"
                raise DataError(f"{self.where}: {text}; fetch the files again")
        self._ids: dict[str, int] = {**vocabulary, **{token["content"]: number for number, token in self._added.items()}}
        names = {number: name for name, number in sorted(self._ids.items())}
        if twice := [f"{name!r} and {names[number]!r}" for name, number in sorted(self._ids.items()) if names[number] != name]:
            raise DataError(f"{self.where}: {twice[0]} have one id, expected one of each token; fetch it again")
        self.size = max(self._ids.values()) + 1
        self.special = {number for number, token in self._added.items() if token.get("special")}
        self.bos, self.eos, self.pad = (self._special_id(f"{name}_token") for name in ("bos", "eos", "pad"))
        self.prefix, self.suffix = list[int](), list[int]()  # the ids that the file adds before and after a text
        if not self.is_bytes:
            encoding = _call_library(lambda: self._backend().encode("a", add_special_tokens=True), self.where)
            mask = [*encoding.special_tokens_mask, 1]
            first = mask.index(0) if 0 in mask else 0
            last = len(mask) - 1 - mask[::-1].index(0) if 0 in mask else len(mask) - 2
            self.prefix, self.suffix = list(encoding.ids[:first]), list(encoding.ids[last + 1 :])
        decoder = content.get("decoder") or {}
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        self._is_byte_level = [step.get("type") for step in steps] == ["ByteLevel"]

    # ---- constructors

    @classmethod
    def load(cls, source: str | Path) -> "Tokenizer":
        """Load from tokenizer.json, its folder, or the word "bytes". Raises DataError, which names the file."""
        if str(source) == BYTES:
            return cls.byte_level()
        path = Path(source)
        path = path / CONTENT if path.is_dir() else path
        text, template = _read(path), path.with_name(TEMPLATE)
        config, added, special = (_parsed(_read(file), str(file)) if (file := path.with_name(name)).is_file() else {}
                                  for name in (CONFIG, ADDED, SPECIAL))  # fmt: skip
        config |= {key: special[key] for key in ("bos_token", "eos_token", "pad_token")
                   if key in special and config.get(key) is None}  # fmt: skip
        if template.is_file():
            config["chat_template"] = _read(template)
        with check_fields(path.parent, f"added tokens in {CONFIG} and {ADDED} as Hugging Face writes them", DataError):
            text = _with_added_tokens(text, config, added, path)
        return cls(text, config, str(path))

    @classmethod
    def byte_level(cls) -> "Tokenizer":
        """Return the tokenizer whose tokens are the bytes of UTF-8, with the end-of-text token 256."""
        return cls(json.dumps(_BYTE_TOKENIZER, ensure_ascii=False), {"eos_token": END}, BYTES)

    @classmethod
    def train(cls, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> "Tokenizer":
        """Train byte-level BPE of at most ``size`` tokens: end-of-text (id 0), further ``special`` tokens, 256 bytes, and merges of
        the most frequent pairs, within the pre-tokens of Llama 3. The result is deterministic. Raises ConfigError for a size that
        is too small for the bytes, DataError for invalid texts."""
        least = 257 + len(special)
        if size < least:
            raise ConfigError(f"a vocabulary of {size}: expected {least} or more, for 256 bytes and {least - 256} special tokens")
        library = import_optional("tokenizers", "training a tokenizer needs", "llm")
        steps = library.pre_tokenizers
        backend = library.Tokenizer(library.models.BPE())
        byte_level = steps.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = steps.Sequence([steps.Split(library.Regex(SPLIT_PATTERN), "isolated"), byte_level])
        backend.decoder = library.decoders.ByteLevel(add_prefix_space=False, use_regex=False)
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END, *special], initial_alphabet=BYTE_CHARACTERS, show_progress=False
        )
        _call_library(lambda: backend.train_from_iterator(texts, trainer), "training a tokenizer")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
        return cls(backend.to_str(pretty=True), config, "trained tokenizer")

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which contains the chat template."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        # tokenizer.json last: if it exists, so does the other, also while several processes write both.
        for name, text in ((CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n"), (CONTENT, self._text)):
            partial = folder / f".{name}.{uuid.uuid4().hex}.partial"
            partial.write_text(text, encoding="utf-8", newline="")
            partial.replace(folder / name)

    # ---- text to ids

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text, without prefix and suffix. Special tokens in it are plain text, unless ``special``. Raises
        DataError for half a surrogate pair, which UTF-8 cannot encode."""
        return self.encode_many([text], special)[0]

    def encode_many(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        if self.is_bytes:
            return [self._bytes(text, special) for text in texts]
        backend = self._backend(special)
        try:
            encodings = _call_library(lambda: backend.encode_batch_fast(list(texts), add_special_tokens=False), self.where)
        except DataError:
            for text in texts:
                _utf8(text)
            raise
        return [encoding.ids for encoding in encodings]

    def encode_document(self, text: str) -> list[int]:
        """Return the ids of a document: the text with prefix, suffix and end-of-text token."""
        return [*self.prefix, *self.encode(text), *self.end_tokens]

    @cached_property
    def end_tokens(self) -> list[int]:
        """The suffix, which always ends with an end-of-text token. Raises DataError if the files name none."""
        if self.suffix and self.eos in (None, self.suffix[-1]):
            return self.suffix
        if self.eos is None:
            raise DataError(f"{self.where}: names no token that ends a text; give {CONFIG} beside it an \"eos_token\"")
        return [*self.suffix, self.eos]

    def token_id(self, token: str) -> int:
        """Return the id of a token. Raises DataError if there is none."""
        if token not in self._ids:
            raise DataError(f"{self.where}: has no token {token!r}")
        return self._ids[token]

    # ---- ids to text

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD. Raises DataError for an unknown id."""
        checked = self._checked(ids, skip_special)
        if (pieces := self._pieces) is not None:
            return b"".join([pieces[token] for token in checked]).decode("utf-8", "replace")
        return str(_call_library(lambda: self._backend().decode(checked, skip_special_tokens=False), self.where))

    def stream(self, skip_special: bool = False) -> "DecodeStream":
        return DecodeStream(self, skip_special)

    def _checked(self, ids: Iterable[int], skip_special: bool) -> list[int]:
        tokens = [int(token) for token in ids]
        for token in tokens:
            if not 0 <= token < self.size:
                raise DataError(f"{self.where}: no token has the id {token}; they go from 0 to {self.size - 1}")
        return [token for token in tokens if token not in self.special] if skip_special else tokens

    @cached_property
    def _pieces(self) -> list[bytes] | None:
        """The bytes of each id, or None if the decoder does more than concatenate bytes."""
        if not self._is_byte_level:
            return None
        pieces = [b""] * self.size
        for token, index in self._ids.items():
            is_text = index in self._added or any(character not in _BYTE for character in token)
            pieces[index] = token.encode() if is_text else bytes(_BYTE[character] for character in token)
        return pieces

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        if self._pieces is not None:
            lengths = np.array([len(piece) for piece in self._pieces], np.int32)
        else:
            # The text of a token may depend on whether it begins the text.
            anchor, backend = self._ids.get("a", next(iter(self._ids.values()))), self._backend()
            texts = backend.decode_batch([[anchor], *([anchor, index] for index in range(self.size))], skip_special_tokens=False)
            begin = len(texts[0].encode())
            lengths = np.array([max(len(text.encode()) - begin, 0) for text in texts[1:]], np.int32)
            for token, index in self._ids.items():
                if re.fullmatch("<0x[0-9A-F]{2}>", token):
                    lengths[index] = 1
        lengths[[*self.special]] = 0
        return lengths

    # ---- chats

    def chat(self, messages: Sequence[Mapping[str, Any]], generation: bool = False) -> tuple[list[int], list[int]]:
        """Return the ids of messages ({"role": ..., "content": ...} each) by the chat template, and a mask that is 1 for tokens of
        the assistant. ``generation``: end with the prompt for its next message, with a mask of zeros. Special tokens in a message
        are plain text. Raises DataError if there is no template, and with its message if it rejects the conversation."""
        rendered = self.render_chat(messages, generation)
        ids, mask, spans = list[int](), list[int](), sorted(rendered.answers)
        for begin, tokens, offsets in self._segments(rendered.text, rendered.literal):
            segment_mask = [0] * len(tokens)
            for first, last in spans:
                inside = [n for n, (a, b) in enumerate(offsets) if a < b and begin + a < last and begin + b > first]
                if inside:
                    segment_mask[inside[0] : inside[-1] + 1] = [1] * (inside[-1] + 1 - inside[0])
            ids += tokens
            mask += segment_mask
        return ids, mask

    def render_chat(self, messages: Sequence[Mapping[str, Any]], generation: bool = False) -> Rendered:
        """Render messages as text, with the errors of ``chat``."""
        if (template := self.chat_template) is None:
            raise DataError(f"{self.where}: has no chat template; give {CONFIG} beside it a \"chat_template\"")
        names = {key: _token_text(value) for key, value in self.config.items() if key.endswith("_token")}
        variables = {key: value for key, value in names.items() if value is not None}
        special = [self._added[index]["content"] for index in self.special]
        return render(template, self.where, messages, special, generation, tools=None, **variables)

    @property
    def chat_template(self) -> str | None:
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {item.get("name"): item.get("template") for item in template}.get("default")
        return template if isinstance(template, str) else None

    @cached_property
    def turn_ends(self) -> set[int]:
        """The special token with which the chat template ends a message of the assistant, if there is one."""
        with suppress(DataError):  # of a template that expects other messages
            ids, mask = self.chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
            return {*[token for token, inside in zip(ids, mask) if inside][-1:]} & self.special
        return set()

    def _segments(self, text: str, literal: set[int]) -> Iterator[tuple[int, list[int], list[tuple[int, int]]]]:
        """Yield start, ids and offsets of segments of a text. Special tokens are parsed, except those at offsets ``literal``."""

        def encode(begin: int, end: int, special: bool = False) -> tuple[int, list[int], list[tuple[int, int]]]:
            encoding = _call_library(lambda: self._backend(special).encode(text[begin:end], add_special_tokens=False), self.where)
            return begin, encoding.ids, encoding.offsets

        if not literal:
            yield encode(0, len(text), special=True)
            return
        at = 0
        for match in self._pattern.finditer(text):
            group = match.lastindex or 0
            if match.start(group) not in literal:
                yield encode(at, match.start())
                yield match.start(), [self.token_id(match[group])], [(0, match.end() - match.start())]
                at = match.end()
        yield encode(at, len(text))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """A pattern of special tokens, the longest first, with the white space that some of them strip."""
        tokens = sorted((self._added[index] for index in self.special), key=lambda token: -len(token["content"]))
        sides = (r"\s*" if token.get(side) else "" for token in tokens for side in ("lstrip", "rstrip"))
        return re.compile("|".join(f"{next(sides)}({re.escape(token['content'])}){next(sides)}" for token in tokens) or r"(?!)")

    # ---- the library

    def _backend(self, special: bool = False) -> Any:
        if special not in self._backends:
            library = import_optional("tokenizers", "tokenizers other than bytes need", "llm")
            backend = _call_library(lambda: library.Tokenizer.from_str(self._text), self.where)
            backend.no_truncation()  # set in some published files
            backend.no_padding()
            backend.encode_special_tokens = not special
            self._backends[special] = backend
        return self._backends[special]

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
        return [*_utf8(first), *(token for part in others for token in (256, *_utf8(part)))]


def tokenizer_files(source: Path) -> dict[str, Path]:
    """Return the files of a tokenizer, by name, in the folder ``source`` or beside the file ``source``."""
    folder = source if source.is_dir() else source.parent
    return {name: file for name in (CONTENT, CONFIG, TEMPLATE) if (file := folder / name).is_file()}


class DecodeStream:
    """Incremental decoding of ids to whole characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._emitted = 0  # ids whose text was returned

    def add(self, token: int) -> str:
        """Return the characters that ``token`` completes, if any."""
        tokenizer = self._tokenizer
        if tokenizer._pieces is not None:
            return "".join(self._decoder.decode(tokenizer._pieces[x]) for x in tokenizer._checked([token], self._skip))
        self._ids += tokenizer._checked([token], self._skip)
        before, text = tokenizer.decode(self._ids[: self._emitted]), tokenizer.decode(self._ids)
        if len(text) <= len(before) or text.endswith(_UNKNOWN):
            return ""
        # The last ids stay as context: the text of a token may differ at the beginning.
        self._ids, self._emitted = self._ids[self._emitted :], len(self._ids) - self._emitted
        return text[len(before) :]

    def finish(self) -> str:
        """Return the remaining text after the last id: U+FFFD for an incomplete character."""
        if self._tokenizer._pieces is not None:
            return self._decoder.decode(b"", True)
        before, text = self._tokenizer.decode(self._ids[: self._emitted]), self._tokenizer.decode(self._ids)
        self._ids, self._emitted = [], 0
        return text[len(before) :]


# ---- files


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8-sig")
    except OSError as problem:
        expected = f"expected {CONTENT}, its folder, or the word {BYTES}"
        raise DataError(f"{path}: cannot be read ({problem.strerror}); {expected}") from problem
    except UnicodeDecodeError as problem:
        hint = _SENTENCEPIECE if path.suffix == ".model" else ""
        raise DataError(f"{path}: not text ({problem.reason} at byte {problem.start}), expected JSON{hint}") from problem


def _parsed(text: str, where: str) -> dict[str, Any]:
    hint = _SENTENCEPIECE if where.endswith(".model") else "; fetch it again"
    return parse_object(text, where, f"an object as Hugging Face writes it{hint}", DataError)


def _with_added_tokens(text: str, config: Mapping[str, Any], added: Mapping[str, int], path: Path) -> str:
    """Return the text of tokenizer.json with the tokens that only ``added_tokens_decoder`` of tokenizer_config.json, or
    added_tokens.json, have. Raises DataError for an id or a token that tokenizer.json has otherwise."""
    marked = {_token_text(value) for key, value in config.items() if key.endswith("_token")}
    tokens = {number: {"content": name, "special": name in marked} for name, number in added.items()}
    tokens |= {int(number): token for number, token in config.get("added_tokens_decoder", {}).items()}
    if not tokens:
        return text
    content = _parsed(text, str(path))
    present = content.setdefault("added_tokens", [])
    by_id, by_name = ({token[key]: token for token in present} for key in ("id", "content"))
    for number, token in sorted(tokens.items()):
        same = by_id.get(number), by_name.get(token["content"])
        if same[0] is not same[1]:
            other = same[0] or same[1] or {}
            text = f"{other['content']!r} has id {other['id']}, in the files beside it {token['content']!r} has {number}"
            raise DataError(f"{path}: {text}; fetch the files again")
        if same[0] is None:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
            present.append({"id": number, **flags, **token})
    return json.dumps(content, ensure_ascii=False)


def _identity(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all that determines ids. Versions of the library write merges and unset fields differently."""
    model = dict(content["model"])
    if model.get("merges"):
        model["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in model["merges"]]
    parts = {name: content.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer")}
    text = json.dumps(_drop_unset({**parts, "model": model}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _drop_unset(value: Any) -> Any:
    """Remove entries that are null, false or empty strings."""
    if isinstance(value, dict):
        return {key: _drop_unset(item) for key, item in value.items() if item is not None and item is not False and item != ""}
    return [_drop_unset(item) for item in value] if isinstance(value, list) else value


def _token_text(value: Any) -> str | None:
    """Return the text of a token of tokenizer_config.json, a string or an object with ``content``."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise DataError(f"text: character {problem.start + 1} is half a surrogate pair, expected valid Unicode") from problem


def _call_library(call: Callable[[], Any], where: str) -> Any:
    """Call the library, and turn its errors into DataError. They have no class of their own, and panics are no Exception."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError, HpcaiError):
        raise
    except BaseException as problem:
        text = f"{where}: {type(problem).__name__}: {str(problem)[:200]}"
        raise DataError(f"{text}; expected a tokenizer as Hugging Face writes it") from problem


_BYTES_IDENTITY = _identity(_BYTE_TOKENIZER)
