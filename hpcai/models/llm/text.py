"""Text from a language model, and what it replies in a conversation.

    model = LLM.load("runs/llm")
    for piece in model.generate("Once upon a time", temperature=0.8, top_p=0.95, stop=["\\n\\n"], most=200):
        print(piece, end="")
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hpcai.errors import ConfigError, DataError
from hpcai.models.llm.config import SamplingConfig
from hpcai.models.llm.generation import Generation, generate
from hpcai.models.llm.model import LLM
from hpcai.models.llm.tokenizer import CONTENT, Tokenizer

_GENERATION_CONFIG = "generation_config.json"


class Text:
    """What a model says. Iterating gives it in pieces as they come, and again from the beginning; ``str`` and ``print`` all of it.
    A piece never holds half a character."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._emitted = pieces, list[str]()

    def __iter__(self) -> Iterator[str]:
        number = 0
        while number < len(self._emitted) or self._pull():
            yield self._emitted[number]
            number += 1

    def __str__(self) -> str:
        return "".join(self)

    __repr__ = __str__  # what a notebook shows

    def _pull(self) -> bool:
        piece = next(self._pieces, None)
        self._emitted += [] if piece is None else [piece]
        return piece is not None


def continue_text(model: LLM, prompts: str | Sequence[str], **words: Any) -> Any:
    """How a text goes on, a ``Text``; for a list of prompts a list of str, which are computed together.

    ``words``: those of ``SamplingConfig``; ``stop``, texts of which the first that is said ends the text and is not part of it;
    ``seed``, to which the number of the prompt is added; ``act``, the ``stages`` of a model that is cut into some, all of whose
    ranks call this together. A text also ends with a token that ends texts. Raises DataError for a prompt that is too long for the
    model, or has no token.
    """
    if isinstance(prompts, str):
        return stream(model, [prompt_tokens(model, prompts)], **words)
    return complete_texts(model, [prompt_tokens(model, prompt) for prompt in prompts], **words)


def chat_reply(model: LLM, messages: Sequence[Mapping[str, Any]], **words: Any) -> Any:
    """What the assistant says next in a conversation, a ``Text``; in a list of conversations, a list of str. ``words`` are those of
    ``go_on``. Raises DataError where the tokenizer has no template of chats, or it refuses the messages."""
    chat = model.tokenizer.chat
    if not messages or isinstance(messages[0], Mapping):
        return stream(model, [chat(messages, True)[0]], fresh=True, **words)
    return complete_texts(model, [chat(each, True)[0] for each in messages], fresh=True, **words)


def prompt_tokens(model: LLM, prompt: str) -> list[int]:
    """The tokens of a text that is to go on, behind what a text of its own begins with (``begin``)."""
    return [*start_tokens(model.tokenizer), *model.tokenizer.encode(prompt)]


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """What stands before a text: what the tokenizer's files put there, or else the end of the one before, as in rows of texts."""
    named = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None]
    return tokenizer.prefix or named[:1]


def stream(model: LLM, prompts: Sequence[Sequence[int]], **words: Any) -> Text:
    """The ``Text`` that follows the tokens of one prompt."""
    return Text(piece for (piece,) in _generate_pieces(model, prompts, **words) if piece)


def complete_texts(model: LLM, prompts: Sequence[Sequence[int]], **words: Any) -> list[str]:
    """The texts that follow the tokens of each prompt."""
    if not prompts:
        return []
    return ["".join(pieces) for pieces in zip(*_generate_pieces(model, prompts, **words))]


def _generate_pieces(
    model: LLM, prompts: Sequence[Sequence[int]], stop: str | Sequence[str] = (), seed: int | Sequence[int] = 0,
    fresh: bool = False, pipeline: Any = None, capture: bool = True, **sampling: Any,
) -> Iterator[list[str]]:  # fmt: skip
    """A piece of each text, perhaps none, again and again. ``fresh``: what is said does not go on with a word of the prompt."""
    tokenizer, ends, stops = model.tokenizer, stop_tokens(model), [stop] if isinstance(stop, str) else [*stop]
    if not all(stops):
        raise ConfigError("stop: a text without letters, which would end every text at once; leave it out")
    words = {"vocab_size": tokenizer.size, "pipeline": pipeline, "capture": capture}
    given = generate(model, prompts, SamplingConfig(**sampling), ends, seed, **words)
    return _stream_pieces(given, [TextStreamer(tokenizer, ends, stops, () if fresh else prompt) for prompt in prompts])


def _stream_pieces(given: Generation, rows: list["TextStreamer"]) -> Iterator[list[str]]:
    for tokens in given:
        yield [row.add(token) for row, token in zip(rows, tokens)]
        for number, row in enumerate(rows):
            given.ended[number] |= row.ended
    yield [row.finish() for row in rows]


class TextStreamer:
    """Tokens of one text as whole characters, up to the first of ``stops``, which may lie across tokens. ``before``: the tokens
    that it goes on from, since a tokenizer may leave out the space before the first word of a text."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], stops: Sequence[str], before: Sequence[int] = ()) -> None:
        self._stream, self._ends, self._stops, self._pending, self.ended = tokenizer.stream(True), ends, stops, "", False
        for token in before:
            self._stream.add(token)

    def add(self, token: int | None) -> str:
        """What is said for sure now."""
        if token is None or self.ended or token in self._ends:
            return ""
        return self._emit(self._pending + self._stream.add(token))

    def finish(self) -> str:
        """What is left when nothing more comes."""
        if self.ended:
            return ""
        text = self._emit(self._pending + self._stream.finish())
        return text + self._pending

    def _emit(self, text: str) -> str:
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.ended, self._pending = True, ""
            return text[: min(places)]
        begun = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - begun :]
        return text[: len(text) - begun]


def _overlap(text: str, stop: str) -> int:
    """How many of the first letters of ``stop`` a text ends with."""
    return next(n for n in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:n]))


# ---- the tokenizer of a model


def get_tokenizer(model: LLM) -> Tokenizer:
    """That which was attached, or else lies beside the weights. Raises DataError where there is none."""
    if (found := vars(model).get("_tokenizer")) is None:
        if not has_tokenizer(model) or model.folder is None:
            where = "the model was not loaded from a folder" if model.folder is None else f"{model.folder}: holds no {CONTENT}"
            raise DataError(f"{where}, so the model has no tokenizer; set model.tokenizer = Tokenizer.load(FOLDER)")
        found = Tokenizer.load(model.folder)
        set_tokenizer(model, found)
    return found


def has_tokenizer(model: LLM) -> bool:
    return "_tokenizer" in vars(model) or (model.folder is not None and (model.folder / CONTENT).is_file())


def set_tokenizer(model: LLM, tokenizer: Tokenizer) -> None:
    """Raises DataError for a tokenizer with more tokens than the model has words."""
    if tokenizer.size > model.cfg.vocabulary:
        told = f"{tokenizer.where}: has ids up to {tokenizer.size - 1}, but the model knows {model.cfg.vocabulary} words"
        raise DataError(f"{told}; it is of another model: give the tokenizer of this one")
    vars(model)["_tokenizer"] = tokenizer


def stop_tokens(model: LLM) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json, which has several for some models."""
    ends = {model.tokenizer.eos} - {None}
    path = None if model.folder is None else model.folder / _GENERATION_CONFIG
    if path is not None and path.is_file():
        try:
            found = json.loads(path.read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as problem:
            raise DataError(f"{path}: {problem}; expected a JSON object with an eos_token_id, or no such file") from problem
        ends |= {each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)}
    return ends
