"""Progress of a long operation on standard error: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hpcai.log import format_bytes

EVERY = 10.0  # seconds between two lines


class Progress(NamedTuple):
    """Progress of the operation named ``label``; ``unit`` is bytes, files or rows."""

    label: str
    done: int
    total: int
    unit: str

    def __str__(self) -> str:
        if self.unit == "bytes":
            return f"{format_bytes(self.done)} of {format_bytes(self.total)}"
        return f"{self.done:,} of {self.total:,} {self.unit}"


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that displays a ``Progress``: one bar per label, or lines."""
    if sys.stderr.isatty():
        with _bars() as show:
            yield show
        return
    last = time.monotonic()

    def print_line(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            print(f"{progress.label}: {progress}", file=sys.stderr, flush=True)

    yield print_line


@contextmanager
def _bars() -> Iterator[Callable[[Progress], None]]:
    from rich import progress as rich
    from rich.console import Console

    columns = (*rich.Progress.get_default_columns(), rich.TextColumn("{task.fields[far]}"))
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, rich.TaskID] = {}

        def show(state: Progress) -> None:
            if state.label not in tasks:
                tasks[state.label] = bars.add_task(state.label, total=state.total, far="")
            bars.update(tasks[state.label], completed=state.done, far=str(state))

        yield show
