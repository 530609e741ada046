"""Text generation and chat with a language model.

    model = LLM.load("runs/llm")
    for piece in model.generate("Once upon a time", temperature=0.8, top_p=0.95, stop=["\\n\\n"], most=200):
        print(piece, end="")
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from itertools import tee
from typing import Any

from hpcai.errors import ConfigError, DataError
from hpcai.json_file import read_object
from hpcai.models.llm.config import EngineConfig, SamplingConfig
from hpcai.models.llm.engine import Engine, Request
from hpcai.models.llm.generation import Generation, generate
from hpcai.models.llm.model import LLM
from hpcai.models.llm.tokenizer import CONTENT, Tokenizer

_GENERATION_CONFIG = "generation_config.json"


class Text:
    """A generated text. Iterate over its pieces as they are generated, any number of times; ``str`` and ``print`` give all of it. A
    piece consists of whole characters."""

    def __init__(self, pieces: Iterator[str]) -> None:
        (self._pieces,) = tee(pieces, 1)  # it stays at the beginning, of which the others are copies

    def __iter__(self) -> Iterator[str]:
        return copy(self._pieces)

    def __str__(self) -> str:
        return "".join(self)

    __repr__ = __str__  # for notebooks


def continue_text(model: LLM, prompts: str | Sequence[str], **kwargs: Any) -> Any:
    """Continue a prompt as a ``Text``, or a list of prompts as a list of str.

    ``kwargs``: fields of ``SamplingConfig``; ``stop``, strings or special tokens before which a text ends; ``seed``, to
    which the index of the prompt is added; ``pipeline`` as ``build_pipeline`` returns it. Collective over all ranks of a sharded
    model. Raises DataError for a prompt without tokens, or too long for the model.
    """
    if isinstance(prompts, str):
        return stream(model, prompt_tokens(model, prompts), **kwargs)
    return complete_texts(model, [prompt_tokens(model, prompt) for prompt in prompts], **kwargs)


def chat_reply(model: LLM, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
    """Generate the next message of the assistant as a ``Text``, or for a list of conversations a list of str. ``kwargs`` as for
    ``continue_text``. Raises DataError if the tokenizer has no chat template, or the template rejects the messages."""
    chat = model.tokenizer.chat
    if not messages or isinstance(messages[0], Mapping):
        return stream(model, chat(messages, True)[0], fresh=True, **kwargs)
    return complete_texts(model, [chat(conversation, True)[0] for conversation in messages], fresh=True, **kwargs)


def prompt_tokens(model: LLM, prompt: str) -> list[int]:
    """Return ``start_tokens`` and the tokens of the prompt."""
    return [*start_tokens(model.tokenizer), *model.tokenizer.encode(prompt)]


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the prefix of the tokenizer, or else its beginning-of-text or end-of-text token, as in packed rows."""
    special = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None]
    return tokenizer.prefix or special[:1]


def stream(
    model: LLM, prompt: Sequence[int], stop: str | Sequence[str] = (), seed: int = 0, fresh: bool = False, pipeline: Any = None,
    capture: bool = True, **sampling: Any,
) -> Text:  # fmt: skip
    """Return the ``Text`` after the tokens of one prompt."""
    ends, streamer = _streamer(model, prompt, stop, fresh)
    kwargs = {"vocab_size": model.tokenizer.size, "pipeline": pipeline, "capture": capture}
    generation = generate(model, [prompt], SamplingConfig(**sampling), ends, seed, **kwargs)
    return Text(filter(None, _stream_pieces(generation, streamer)))


def _stream_pieces(generation: Generation, streamer: "TextStreamer") -> Iterator[str]:
    for (token,) in generation:
        yield streamer.add(token)
        generation.ended[0] |= streamer.ended
    yield streamer.finish()


def complete_texts(
    model: LLM, prompts: Sequence[Sequence[int]], seed: int = 0, pipeline: Any = None, capture: bool = True, **kwargs: Any
) -> list[str]:
    """Return the texts after the tokens of each prompt. ``kwargs`` as for ``Completions.add``."""
    cfg, most = EngineConfig(), kwargs.get("most", SamplingConfig().most)
    lengths = sorted(-(-min(len(prompt) + most, model.cfg.max_length) // cfg.block_size) for prompt in prompts)
    tokens = max(sum(lengths[-cfg.max_num_seqs :]), 1) * cfg.block_size  # of the texts that need most
    completions = Completions(model, EngineConfig(cache_tokens=tokens), pipeline=pipeline, capture=capture)
    for n, prompt in enumerate(prompts):
        completions.add(n, prompt, seed=seed + n, **kwargs)
    return [text for _, text in sorted(completions)]


class Completions:
    """Texts after many prompts, by an engine. Iterate over pairs of name and text: each as soon as it ends.

    ``kwargs``: Arguments of ``Engine``."""

    def __init__(self, model: LLM, cfg: EngineConfig | None = None, **kwargs: Any) -> None:
        self._engine = Engine(model, cfg, vocab_size=model.tokenizer.size, **kwargs)
        self._streamers: dict[Any, tuple[TextStreamer, list[str]]] = {}

    def add(
        self, name: Any, prompt: Sequence[int], stop: str | Sequence[str] = (), seed: int = 0, fresh: bool = False, **sampling: Any
    ) -> None:
        """Add the tokens of a prompt. ``fresh``: its text is a message, and continues no word of the prompt. ``sampling``: fields
        of ``SamplingConfig``."""
        ends, streamer = _streamer(self._engine.model, prompt, stop, fresh)
        self._engine.add(Request(prompt, SamplingConfig(**sampling), seed, ends, name=name))
        self._streamers[name] = streamer, []

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        while self._engine.unfinished:
            for request in self._engine.step():
                streamer, pieces = self._streamers[request.name]
                pieces += map(streamer.add, request.output[streamer.count :])
                if streamer.ended and not request.ended:
                    self._engine.end(request)
                if request.ended:
                    del self._streamers[request.name]
                    yield request.name, "".join(pieces) + streamer.finish()


def _streamer(model: LLM, prompt: Sequence[int], stop: str | Sequence[str], fresh: bool) -> tuple[set[int], "TextStreamer"]:
    """Return the tokens that end a text, and its streamer."""
    tokenizer, ends, stops = model.tokenizer, stop_tokens(model), [stop] if isinstance(stop, str) else [*stop]
    if not all(stops):
        raise ConfigError("stop: an empty string, which would end every text at once; leave it out")
    ends |= {token for token in tokenizer.special if tokenizer.decode([token]) in stops} | (tokenizer.turn_ends if fresh else set())
    return ends, TextStreamer(tokenizer, ends, stops, () if fresh else prompt)


class TextStreamer:
    """Decode the tokens of one text to whole characters, up to the first of ``stops``, which may span tokens. ``prompt``: preceding
    tokens, since a tokenizer may leave out the space before the first word of a text."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], stops: Sequence[str], prompt: Sequence[int] = ()) -> None:
        self._stream, self._ends, self._stops, self._pending, self.ended = tokenizer.stream(True), ends, stops, "", False
        self.count = 0
        """the number of tokens of the text so far"""
        for token in prompt:
            self._stream.add(token)

    def add(self, token: int | None) -> str:
        """Return the text that is final after ``token``; a possible beginning of a stop string is held back."""
        self.count += 1
        if token is None or self.ended or token in self._ends:
            return ""
        return self._emit(self._pending + self._stream.add(token))

    def finish(self) -> str:
        """Return the remaining text after the last token."""
        if self.ended:
            return ""
        text = self._emit(self._pending + self._stream.finish())
        return text + self._pending

    def _emit(self, text: str) -> str:
        offsets = [offset for offset in map(text.find, self._stops) if offset >= 0]
        if offsets:
            self.ended, self._pending = True, ""
            return text[: min(offsets)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` with which ``text`` ends."""
    return next(n for n in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:n]))


# ---- the tokenizer of a model


def get_tokenizer(model: LLM) -> Tokenizer:
    """Return the tokenizer that was set, or load the one in the folder of the weights. Raises DataError if there is none."""
    if (tokenizer := vars(model).get("_tokenizer")) is None:
        if not has_tokenizer(model) or model.folder is None:
            where = "the model was not loaded from a folder" if model.folder is None else f"{model.folder}: holds no {CONTENT}"
            raise DataError(f"{where}, so the model has no tokenizer; set model.tokenizer = Tokenizer.load(FOLDER)")
        tokenizer = Tokenizer.load(model.folder)
        set_tokenizer(model, tokenizer)
    return tokenizer


def has_tokenizer(model: LLM) -> bool:
    return "_tokenizer" in vars(model) or (model.folder is not None and (model.folder / CONTENT).is_file())


def set_tokenizer(model: LLM, tokenizer: Tokenizer) -> None:
    """Set the tokenizer of a model. Raises DataError for one with more tokens than the model's vocabulary."""
    if tokenizer.size > model.cfg.vocabulary:
        actual = f"{tokenizer.where}: has ids up to {tokenizer.size - 1}, the model's vocabulary {model.cfg.vocabulary} entries"
        raise DataError(f"{actual}; it is of another model: give the tokenizer of this one")
    vars(model)["_tokenizer"] = tokenizer


def stop_tokens(model: LLM) -> set[int]:
    """Return the end-of-text tokens of the tokenizer and of generation_config.json, which lists several for some models."""
    ends = {model.tokenizer.eos} - {None}
    path = None if model.folder is None else model.folder / _GENERATION_CONFIG
    if path is not None and path.is_file():
        ids = read_object(path, "an eos_token_id, or no such file", DataError).get("eos_token_id")
        ends |= {token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int)}
    return ends
