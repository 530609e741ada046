"""Conversations as text, by the template that a tokenizer brings.

A template is Jinja, with whitespace around blocks trimmed, ``raise_exception(text)`` to refuse a conversation, and a block tag
``generation`` around what the assistant says. It runs in a sandbox and sees neither time nor files, so that a text is a function of
the messages.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpcai.errors import DataError, HpcaiError
from hpcai.lazy import optional

EXPECTED = "a list such as [{'role': 'user', 'content': 'text'}]"
_MARKS = [chr(0xFDD0 + n) for n in range(32)]  # noncharacters of Unicode, which no text should have


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with places in it, in characters."""

    text: str
    answers: list[tuple[int, int]]
    """begin and end of what the assistant says"""
    literal: set[int]
    """where a special token stands that somebody wrote, and which means nothing"""


def render(template: str, where: str, messages: Sequence[Mapping[str, Any]], special: Iterable[str], **variables: Any) -> Rendered:
    """The text of ``messages``; ``special`` tokens that are written in them are noted as literal. ``words`` is what the template
    sees besides. Raises DataError with the template's words where it refuses them, and for one that is none, which ``where``
    names."""
    try:
        # Only what is sent as text may hold noncharacters; escapes would hide them.
        used = set(json.dumps(messages, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as problem:
        raise DataError(f"messages: not what JSON holds ({problem}); expected {EXPECTED}") from None
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"messages: a {type(messages).__name__}, expected {EXPECTED}")
    free = [mark for mark in _MARKS if mark not in used and mark not in template]
    if len(free) < 3:
        raise DataError("messages: hold nearly all noncharacters of Unicode (U+FDD0 to U+FDEF); they are no text")
    literal, begin, end = free[:3]
    found = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, found)) or r"(?!)")
    try:
        told = _mark_special(messages, pattern, literal)
        text = _compile(template).render(messages=told, raise_exception=_refuse, generation_marks=(begin, end), **variables)
    except HpcaiError:
        raise
    except Exception as problem:  # a template can fail in any way that Python can
        raise DataError(f"{where}: chat template: {problem or type(problem).__name__}") from problem
    return _strip_marks(text, literal, begin, end)


def _refuse(text: str) -> None:
    raise ValueError(text)


def _mark_special(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """The value with a mark before every special token in its texts."""
    if isinstance(value, str):
        return pattern.sub(lambda match: mark + match[0], value)
    if isinstance(value, Mapping):
        return {key: _mark_special(each, pattern, mark) for key, each in value.items()}
    return [_mark_special(each, pattern, mark) for each in value] if isinstance(value, list | tuple) else value


def _strip_marks(marked: str, literal: str, begin: str, end: str) -> Rendered:
    parts, answers, places, at = list[str](), list[tuple[int, int]](), set[int](), 0
    open_at: list[int] = []
    for part in re.split(f"([{literal}{begin}{end}])", marked):
        if part == literal:
            places.add(at)
        elif part == begin:
            open_at.append(at)
        elif part == end and open_at:
            answers.append((open_at.pop(), at))
        else:
            parts.append(part)
            at += len(part)
    return Rendered("".join(parts), answers, places)


@lru_cache(8)
def _compile(template: str) -> Any:
    sandbox = optional("jinja2.sandbox", "chat templates need", "llm")
    nodes, extension = (optional(f"jinja2.{name}", "chat templates need", "llm") for name in ("nodes", "ext"))

    class Generation(extension.Extension):  # type: ignore[name-defined]
        """{% generation %} ... {% endgeneration %}"""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = nodes.Name("generation_marks", "load")
            return nodes.CallBlock(self.call_method("_between", [marks]), [], [], body).set_lineno(line)

        def _between(self, marks: tuple[str, str], caller: Any) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return made.from_string(template)
