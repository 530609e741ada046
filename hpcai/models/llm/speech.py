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
from hpcai.models.llm.tokens import CONTENT, Tokenizer

_ENDS = "generation_config.json"


class Text:
    """What a model says. Iterating gives it in pieces as they come, and again from the beginning; ``str`` and ``print`` all of it.
    A piece never holds half a character."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._told = pieces, list[str]()

    def __iter__(self) -> Iterator[str]:
        number = 0
        while number < len(self._told) or self._pull():
            yield self._told[number]
            number += 1

    def __str__(self) -> str:
        return "".join(self)

    __repr__ = __str__  # what a notebook shows

    def _pull(self) -> bool:
        piece = next(self._pieces, None)
        self._told += [] if piece is None else [piece]
        return piece is not None


def go_on(model: LLM, prompts: str | Sequence[str], **words: Any) -> Any:
    """How a text goes on, a ``Text``; for a list of prompts a list of str, which are computed together.

    ``words``: those of ``SamplingConfig``; ``stop``, texts of which the first that is said ends the text and is not part of it;
    ``seed``, to which the number of the prompt is added; ``act``, the ``stages`` of a model that is cut into some, all of whose
    ranks call this together. A text also ends with a token that ends texts. Raises DataError for a prompt that is too long for the
    model, or has no token.
    """
    if isinstance(prompts, str):
        return speak(model, [tokens_of(model, prompts)], **words)
    return collected(model, [tokens_of(model, prompt) for prompt in prompts], **words)


def reply(model: LLM, messages: Sequence[Mapping[str, Any]], **words: Any) -> Any:
    """What the assistant says next in a conversation, a ``Text``; in a list of conversations, a list of str. ``words`` are those of
    ``go_on``. Raises DataError where the tokenizer has no template of chats, or it refuses the messages."""
    chat = model.tokenizer.chat
    if not messages or isinstance(messages[0], Mapping):
        return speak(model, [chat(messages, True)[0]], fresh=True, **words)
    return collected(model, [chat(each, True)[0] for each in messages], fresh=True, **words)


def tokens_of(model: LLM, prompt: str) -> list[int]:
    """The tokens of a text that is to go on, behind what a text of its own begins with (``begin``)."""
    return [*begin(model.tokenizer), *model.tokenizer.encode(prompt)]


def begin(tokenizer: Tokenizer) -> list[int]:
    """What stands before a text: what the tokenizer's files put there, or else the end of the one before, as in rows of texts."""
    named = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None]
    return tokenizer.before or named[:1]


def speak(model: LLM, prompts: Sequence[Sequence[int]], **words: Any) -> Text:
    """The ``Text`` that follows the tokens of one prompt."""
    return Text(piece for (piece,) in _pieces(model, prompts, **words) if piece)


def collected(model: LLM, prompts: Sequence[Sequence[int]], **words: Any) -> list[str]:
    """The texts that follow the tokens of each prompt."""
    if not prompts:
        return []
    return ["".join(pieces) for pieces in zip(*_pieces(model, prompts, **words))]


def _pieces(
    model: LLM, prompts: Sequence[Sequence[int]], stop: str | Sequence[str] = (), seed: int | Sequence[int] = 0,
    fresh: bool = False, act: Any = None, capture: bool = True, **sampling: Any,
) -> Iterator[list[str]]:  # fmt: skip
    """A piece of each text, perhaps none, again and again. ``fresh``: what is said does not go on with a word of the prompt."""
    tokenizer, ends, stops = model.tokenizer, ends_of(model), [stop] if isinstance(stop, str) else [*stop]
    if not all(stops):
        raise ConfigError("stop: a text without letters, which would end every text at once; leave it out")
    words = {"words": tokenizer.size, "act": act, "capture": capture}
    given = generate(model, prompts, SamplingConfig(**sampling), ends, seed, **words)
    return _read(given, [Saying(tokenizer, ends, stops, () if fresh else prompt) for prompt in prompts])


def _read(given: Generation, rows: list["Saying"]) -> Iterator[list[str]]:
    for tokens in given:
        yield [row.add(token) for row, token in zip(rows, tokens)]
        for number, row in enumerate(rows):
            given.ended[number] |= row.ended
    yield [row.finish() for row in rows]


class Saying:
    """Tokens of one text as whole characters, up to the first of ``stops``, which may lie across tokens. ``before``: the tokens
    that it goes on from, since a tokenizer may leave out the space before the first word of a text."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], stops: Sequence[str], before: Sequence[int] = ()) -> None:
        self._stream, self._ends, self._stops, self._held, self.ended = tokenizer.stream(True), ends, stops, "", False
        for token in before:
            self._stream.add(token)

    def add(self, token: int | None) -> str:
        """What is said for sure now."""
        if token is None or self.ended or token in self._ends:
            return ""
        return self._cut(self._held + self._stream.add(token))

    def finish(self) -> str:
        """What is left when nothing more comes."""
        if self.ended:
            return ""
        text = self._cut(self._held + self._stream.finish())
        return text + self._held

    def _cut(self, text: str) -> str:
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.ended, self._held = True, ""
            return text[: min(places)]
        begun = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _begun(text: str, stop: str) -> int:
    """How many of the first letters of ``stop`` a text ends with."""
    return next(n for n in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:n]))


# ---- the tokenizer of a model


def tokenizer_of(model: LLM) -> Tokenizer:
    """That which was attached, or else lies beside the weights. Raises DataError where there is none."""
    if (found := vars(model).get("_tokenizer")) is None:
        if not has_tokenizer(model) or model.home is None:
            where = "the model was not loaded from a folder" if model.home is None else f"{model.home}: holds no {CONTENT}"
            raise DataError(f"{where}, so the model has no tokenizer; set model.tokenizer = Tokenizer.load(FOLDER)")
        found = Tokenizer.load(model.home)
        attach(model, found)
    return found


def has_tokenizer(model: LLM) -> bool:
    return "_tokenizer" in vars(model) or (model.home is not None and (model.home / CONTENT).is_file())


def attach(model: LLM, tokenizer: Tokenizer) -> None:
    """Raises DataError for a tokenizer with more tokens than the model has words."""
    if tokenizer.size > model.cfg.vocabulary:
        told = f"{tokenizer.where}: has ids up to {tokenizer.size - 1}, but the model knows {model.cfg.vocabulary} words"
        raise DataError(f"{told}; it is of another model: give the tokenizer of this one")
    vars(model)["_tokenizer"] = tokenizer


def ends_of(model: LLM) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json, which has several for some models."""
    ends = {model.tokenizer.eos} - {None}
    path = None if model.home is None else model.home / _ENDS
    if path is not None and path.is_file():
        try:
            found = json.loads(path.read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as problem:
            raise DataError(f"{path}: {problem}; expected a JSON object with an eos_token_id, or no such file") from problem
        ends |= {each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)}
    return ends
