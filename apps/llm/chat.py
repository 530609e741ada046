"""Chat at a terminal:  python -m apps.llm chat weights=FOLDER [system="Be brief." temperature=0.7 mesh.tensor=2 ...]

Each line of standard input is a message; its answer is streamed to standard output. /reset begins another conversation. Ctrl-C ends
an answer; a second one, or one at the prompt, ends the chat, as Ctrl-D does. Lines may also come from a pipe.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from apps.llm.prompting import TextConfig, load_model, run_command
from hpcai.errors import ConfigError, DataError
from hpcai.stop import defer_interrupts

RESET = "/reset"


class ChatConfig(TextConfig):
    """A trained model with a chat template, and the sampling of its answers."""

    system: str | None = None
    """instruction for all answers; null: that of the template"""


def main(cfg: ChatConfig) -> None:
    from hpcai import dist
    from hpcai.dist.watchdog import HEARTBEAT

    with dist.start(cfg.mesh) as mesh:
        if (size := mesh["replicate"].size) > 1:
            raise ConfigError(f"{size} replicas of the model for one conversation; set mesh.tensor={size}, or start one process")
        HEARTBEAT.attended = True
        try:
            chat(cfg, mesh)
        finally:
            HEARTBEAT.attended = False


run = partial(run_command, ChatConfig, main, text="system")


def chat(cfg: ChatConfig, mesh: Any) -> None:
    """Answer the lines of standard input, which the first rank reads, until its end."""
    from hpcai.dist.collectives import broadcast_object
    from hpcai.models.llm.text import chat_reply

    ranks = mesh.subgroup("chat", range(mesh.world))  # with a timeout of days: the others wait for a person
    model, pipeline = load_model(cfg, mesh)
    system, turns = [{"role": "system", "content": cfg.system}] if cfg.system is not None else [], list[Any]()
    if model.tokenizer.chat_template is None:
        raise DataError(f"{model.tokenizer.where}: has no chat template: the model knows no messages; continue texts with "
                        "generate, or train on rows of chats: data_prep.text convert CHATS.jsonl OUT --chat")  # fmt: skip
    model.tokenizer.chat([*system, {"role": "user", "content": "a"}], True)  # raises if the template rejects the system message
    tell(mesh, f"{cfg.weights}: {RESET} begins another conversation, Ctrl-C ends an answer, Ctrl-D the chat")
    while (line := broadcast_object(read_line() if mesh.is_first else None, ranks)) is not None:
        if line.strip() == RESET:
            turns = []
            tell(mesh, "another conversation")
        if line.strip() in ("", RESET):
            continue
        with defer_interrupts() as interrupts:
            kept = fit_context(model, system, [*turns, {"role": "user", "content": line}], cfg.most)
            if len(kept) <= len(turns):
                actual = f"the context of {model.cfg.positions:,} tokens is full"
                tell(mesh, f"{actual}: the oldest messages are left out" if kept else f"{actual} with this message; shorten it")
            if not kept:
                continue
            turns = [*kept, {"role": "assistant", "content": ""}]
            seed = cfg.seed + len(turns)
            kwargs = {"pipeline": pipeline, "capture": cfg.capture, **cfg.sampling}
            for piece in chat_reply(model, [*system, *turns[:-1]], seed=seed, **kwargs):
                turns[-1]["content"] += piece
                if mesh.is_first:
                    print(piece, end="", flush=True)
                if broadcast_object(len(interrupts), ranks):
                    break
            interrupts.clear()
        if mesh.is_first:
            print(flush=True)


def tell(mesh: Any, text: str) -> None:
    if mesh.is_first:
        sys.stderr.write(f"({text})\n")


def read_line() -> str | None:
    """Return the next line of standard input, or None at its end. A terminal has a prompt, and its keys edit the line."""
    try:
        line = input("> ") if sys.stdin.isatty() and sys.stdout.isatty() else next(sys.stdin, None)
    except EOFError:
        line = None
        print()
    return line and line.removesuffix("\n")


def fit_context(model: Any, system: Sequence[Any], turns: list[Any], most: int) -> list[Any]:
    """Return the last turns that leave room for ``most`` tokens, or for a quarter of the context; [] if none does."""
    room = model.cfg.positions - min(most, model.cfg.positions // 4)
    while turns and len(model.tokenizer.chat([*system, *turns], True)[0]) > room:
        turns = turns[2:]  # a question and its answer
    return turns
