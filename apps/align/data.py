"""Prompts and pairs of answers, from JSON lines."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hpcai.dist import Mesh
from hpcai.dist.collectives import broadcast_from_first
from hpcai.errors import DataError
from hpcai.json_file import read_json_lines
from hpcai.models.llm import Pair, Prompt, Tokenizer
from hpcai.models.llm.text import start_tokens
from hpcai.programs import command_of

EXPECTED_PROMPT = 'a line such as {"prompt": "37+85=", "answer": "122"}'
EXPECTED_PAIR = 'a line such as {"prompt": "37+85=", "chosen": "122", "rejected": "112"}'


def read_prompts(path: Path, tokenizer: Tokenizer, mesh: Mesh) -> list[Prompt]:
    """Return the prompts of a file. Raises DataError with the number of a line that is no prompt."""
    return _read(path, mesh, EXPECTED_PROMPT, partial(_prompt, tokenizer))


def read_pairs(path: Path, tokenizer: Tokenizer, mesh: Mesh) -> list[Pair]:
    """Return the pairs of a file. Raises DataError with the number of a line that is no pair."""
    return _read(path, mesh, EXPECTED_PAIR, partial(_pair, tokenizer))


def _read(path: Path, mesh: Mesh, expected: str, convert: Callable[[str, dict[str, Any]], Any]) -> list[Any]:
    def read() -> list[Any]:
        if not path.is_file():
            raise DataError(f"{path}: no such file; make it with: {command_of('data_prep.alignment')}, or set data.directory")
        items = []
        for number, content in read_json_lines(path, expected):
            try:
                items.append(convert(where := f"{path}: line {number}", content))
            except (KeyError, TypeError, AttributeError) as problem:
                raise DataError(f"{where}: has {', '.join(content) or 'nothing'}, expected {expected}") from problem
        if not items:
            raise DataError(f"{path}: has no line, expected {expected}")
        return items

    return broadcast_from_first(read, mesh.peers)


def _prompt(tokenizer: Tokenizer, where: str, content: dict[str, Any]) -> Prompt:
    text, tokens = _prompt_tokens(tokenizer, content["prompt"])
    return Prompt(text, tokens, {name: value for name, value in content.items() if name != "prompt"}, where)


def _prompt_tokens(tokenizer: Tokenizer, prompt: Any) -> tuple[str, list[int]]:
    """Return the text and the tokens of a prompt, as in packed rows."""
    if isinstance(prompt, list):
        return str(prompt[-1]["content"]), tokenizer.chat(prompt, True)[0]
    return prompt, [*start_tokens(tokenizer), *tokenizer.encode(prompt)]


def _pair(tokenizer: Tokenizer, where: str, content: dict[str, Any]) -> Pair:
    prompt, end = content["prompt"], [] if tokenizer.eos is None else [tokenizer.eos]
    _, tokens = _prompt_tokens(tokenizer, prompt)
    if isinstance(prompt, list):
        chats = ([*prompt, {"role": "assistant", "content": content[name]}] for name in ("chosen", "rejected"))
        return Pair(tokens, *(tokenizer.chat(chat)[0][len(tokens) :] for chat in chats), where)
    return Pair(tokens, *([*tokenizer.encode(content[name]), *end] for name in ("chosen", "rejected")), where)
