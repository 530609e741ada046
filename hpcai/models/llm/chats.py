"""Chat templates: render the messages of a conversation as text, by the template in the files of a tokenizer.

A template is Jinja with ``trim_blocks`` and ``lstrip_blocks``, the function ``raise_exception(text)``, and the block tag
``generation`` around the messages of the assistant. It runs in a sandbox without access to time and files, so that the text is a
function of the messages. It runs in a child process, with at most 2 GiB of memory and 10 s for a conversation.
"""

import atexit
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpcai.child_process import Worker
from hpcai.errors import DataError
from hpcai.lazy import import_optional

EXPECTED = "a list such as [{'role': 'user', 'content': 'text'}]"
_MAX_CHARACTERS = 1 << 25
_renderer = Worker("a chat template", "expected one that renders a conversation", 10, 2 << 30)
atexit.register(_renderer.kill)
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_MARKS = [chr(0xFDD0 + n) for n in range(32)]  # noncharacters of Unicode, which text should not contain


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. Offsets are in characters."""

    text: str
    answers: list[tuple[int, int]]
    """start and end of each message of the assistant"""
    literal: set[int]
    """offsets of special tokens that a message contains as plain text"""


def render(template: str, where: str, messages: Sequence[Mapping[str, Any]], special: Iterable[str], **variables: Any) -> Rendered:
    """Render ``messages`` as text. ``special`` tokens that messages contain are recorded as literal; ``variables`` are further ones
    of the template. Raises DataError, which names ``where``, for an invalid template, and with the template's message if it
    rejects the conversation."""
    try:
        used = set(json.dumps(messages, ensure_ascii=False))  # unescaped: escapes would hide noncharacters
    except (TypeError, ValueError, RecursionError) as problem:
        raise DataError(f"messages: not JSON ({problem}); expected {EXPECTED}") from None
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"messages: a {type(messages).__name__}, expected {EXPECTED}")
    messages = [_to_text(message) for message in messages]
    free = [mark for mark in _MARKS if mark not in used and mark not in template]
    if len(free) < 3:
        raise DataError("messages: nearly all noncharacters of Unicode (U+FDD0 to U+FDEF) are used; expected text without them")
    literal, begin, end = free[:3]
    tokens = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
    import_optional("jinja2.sandbox", "chat templates need", "llm")
    try:
        text = _renderer.call(_render, template, _mark_special(messages, pattern, literal), (begin, end), variables)
    except DataError as problem:
        raise DataError(f"{where}: chat template: {problem}") from problem
    parts, answers, literals, offset = list[str](), list[tuple[int, int]](), set[int](), 0
    starts: list[int] = []
    for part in re.split(f"([{literal}{begin}{end}])", text):
        if part == literal:
            literals.add(offset)
        elif part == begin:
            starts.append(offset)
        elif part == end and starts:
            answers.append((starts.pop(), offset))
        else:
            parts.append(part)
            offset += len(part)
    return Rendered("".join(parts), answers, literals)


def _to_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its content as a string: parts of text are joined, null is empty. ShareGPT's ``from`` and ``value``
    become role and content. Raises DataError for another content."""
    if "role" not in message and "from" in message:
        if (role := _SHAREGPT_ROLES.get(str(message["from"]))) is None:
            raise DataError(f"messages: one is from {message['from']!r}, expected {', '.join(_SHAREGPT_ROLES)}")
        message = {"role": role, "content": message.get("value")}
    if "role" not in message or not {"content", "tool_calls"} & message.keys():
        raise DataError(f"messages: one has {', '.join(map(str, message)) or 'nothing'}, expected role and content")
    content = message.get("content")
    if isinstance(content, list):
        kinds = {str(part.get("type", "text")) if isinstance(part, Mapping) else type(part).__name__ for part in content}
        if kinds - {"text"} or not all(isinstance(part.get("text"), str) for part in content):
            raise DataError(f"messages: one has parts of type {', '.join(sorted(kinds))}, expected text")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise DataError(f"messages: the content of one is a {type(content).__name__}, expected text")
    return {**message, "content": content or ""}


def _render(template: str, messages: Any, marks: tuple[str, str], variables: Mapping[str, Any]) -> Iterator[str]:
    """Render a template in a child process. Raises DataError."""
    try:
        text = str(_compile(template).render(messages=messages, raise_exception=_raise, generation_marks=marks, **variables))
    except Exception as problem:  # a template can raise any exception
        raise DataError(str(problem) or type(problem).__name__) from problem
    if len(text) > _MAX_CHARACTERS:
        raise DataError(f"renders {len(text):,} characters; expected at most {_MAX_CHARACTERS:,}")
    yield text


def _raise(text: str) -> None:
    raise ValueError(text)


def _mark_special(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """Insert ``mark`` before every special token in the strings of ``value``."""
    if isinstance(value, str):
        return pattern.sub(lambda match: mark + match[0], value)
    if isinstance(value, Mapping):
        return {key: _mark_special(item, pattern, mark) for key, item in value.items()}
    return [_mark_special(item, pattern, mark) for item in value] if isinstance(value, list | tuple) else value


@lru_cache(8)
def _compile(template: str) -> Any:
    sandbox = import_optional("jinja2.sandbox", "chat templates need", "llm")
    nodes, extension = (import_optional(f"jinja2.{name}", "chat templates need", "llm") for name in ("nodes", "ext"))

    class Generation(extension.Extension):  # type: ignore[name-defined]
        """{% generation %} ... {% endgeneration %}"""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = nodes.Name("generation_marks", "load")
            return nodes.CallBlock(self.call_method("_enclose", [marks]), [], [], body).set_lineno(line)

        def _enclose(self, marks: tuple[str, str], caller: Any) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(template)
