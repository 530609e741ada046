"""Chat templates: render the messages of a conversation as text, by the template in the files of a tokenizer.

A template is Jinja with ``trim_blocks`` and ``lstrip_blocks``, the function ``raise_exception(text)``, and the block tag
``generation`` around the messages of the assistant. Most published templates have no such blocks: these messages are then found by
rendering the beginnings of the conversation. A template runs in a sandbox without access to time and files, so that the text is a
function of the messages. It runs in a child process, with at most 2 GiB of memory and 10 s for a conversation.
"""

import atexit
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcai.child_process import Worker
from hpcai.errors import DataError
from hpcai.lazy import import_optional

EXPECTED = "a list such as [{'role': 'user', 'content': 'text'}]"
_MAX_CHARACTERS = 1 << 25
_renderer = Worker("a chat template", "expected one that renders a conversation", 10, 2 << 30)
atexit.register(_renderer.kill)
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").strip()
"""the template for tokenizers without one; ``ROLE_TOKENS`` may be special tokens or text"""
_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")
_MARKS = [chr(0xFDD0 + n) for n in range(32)]  # noncharacters of Unicode, which text should not contain


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. Offsets are in characters."""

    text: str
    answers: list[tuple[int, int]]
    """start and end of each message of the assistant"""
    literal: set[int]
    """offsets of special tokens that a message contains as plain text"""


def render(
    template: str, where: str, messages: Sequence[Mapping[str, Any]], special: Iterable[str], generation: bool = False,
    **variables: Any,
) -> Rendered:  # fmt: skip
    """Render ``messages`` as text, with ``generation`` up to the next message of the assistant; no answers are found then.
    ``special`` tokens that messages contain are recorded as literal; ``variables`` are further ones of the template. Raises
    DataError, which names ``where``, for an invalid template, with the template's message if it rejects the conversation, and for
    an answer that cannot be found."""
    try:
        used = set(json.dumps(messages, ensure_ascii=False))  # unescaped: escapes would hide noncharacters
    except (TypeError, ValueError, RecursionError) as problem:
        raise DataError(f"messages: not JSON ({problem}); expected {EXPECTED}") from None
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"messages: a {type(messages).__name__}, expected {EXPECTED}")
    messages = [to_text(message) for message in messages]
    free = [mark for mark in _MARKS if mark not in used and mark not in template]
    if len(free) < 3:
        raise DataError("messages: nearly all noncharacters of Unicode (U+FDD0 to U+FDEF) are used; expected text without them")
    literal, begin, end = free[:3]
    tokens = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
    import_optional("jinja2.sandbox", "chat templates need", "llm")

    marked = _mark_special(messages, pattern, literal)

    def run(*conversations: tuple[Sequence[Any], bool]) -> list[tuple[str, dict[str, list[int]]]]:
        texts = _renderer.call(_render, template, conversations, (begin, end), variables)
        return [_split_marks(text, literal + begin + end) for text in texts]

    try:
        ((text, offsets),) = run((marked, generation))
        answers = [*zip(offsets[begin], offsets[end])]
        if not generation and not _GENERATION_BLOCK.search(template):
            answers = _find_answers(lambda *conversations: [each for each, _ in run(*conversations)], text, marked)
    except DataError as problem:
        raise DataError(f"{where}: chat template: {problem}") from problem
    return Rendered(text, answers, {*offsets[literal]})


def _split_marks(text: str, marks: str) -> tuple[str, dict[str, list[int]]]:
    """Return a text without ``marks``, and the offsets of each of them."""
    parts, offsets, at = list[str](), {mark: list[int]() for mark in marks}, 0
    for part in re.split(f"([{marks}])", text):
        if part in offsets:
            offsets[part].append(at)
        else:
            parts.append(part)
            at += len(part)
    return "".join(parts), offsets


def _find_answers(run: Callable[..., list[str]], full: str, messages: Sequence[Any]) -> list[tuple[int, int]]:
    """Return start and end of each message of the assistant in ``full``, without white space at the end, by rendering the messages
    up to it. Raises DataError if the messages before it, or its end, are rendered otherwise when others follow."""
    answers = list[tuple[int, int]]()
    for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
        try:
            before, prompt, after = run((messages[:n], False), (messages[:n], True), (messages[: n + 1], False))
            reason = "" if full.startswith(before) else "renders the messages before it otherwise than without it"
        except DataError as problem:
            reason = f"rejects the messages before it alone ({problem})"
        if not reason:
            # The prompt may begin the reasoning, which is left out of a message before others: that is then the end of ``after``.
            start = next((k for k, (a, b) in enumerate(zip(prompt, full)) if a != b), len(prompt))
            ends = (after[k:] for k in range(start, len(after)) if after[k] == full[start : start + 1])
            answer = next((end for end in ends if full.startswith(end, start)), "").rstrip()
            reason = "" if answer and start >= len(before) else "renders its end otherwise when others follow"
        if reason:
            advice = "put {% generation %} blocks around answers into the template, or leave the conversation out"
            raise DataError(f"it {reason}: message {n + 1} of {len(messages)}, of the assistant; {advice}")
        answers.append((start, start + len(answer)))
    return answers


def to_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _render(
    template: str, conversations: Sequence[tuple[Any, bool]], marks: tuple[str, str], variables: Mapping[str, Any]
) -> Iterator[list[str]]:
    """Render conversations, each with or without the prompt for a further message, in a child process. Raises DataError."""
    kwargs = {"raise_exception": _raise, "generation_marks": marks, **variables}
    try:
        texts = [_compile(template).render(messages=each, add_generation_prompt=flag, **kwargs) for each, flag in conversations]
    except Exception as problem:  # a template can raise any exception
        raise DataError(str(problem) or type(problem).__name__) from problem
    if (length := max(map(len, texts))) > _MAX_CHARACTERS:
        raise DataError(f"renders {length:,} characters; expected at most {_MAX_CHARACTERS:,}")
    yield texts


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

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(template)
