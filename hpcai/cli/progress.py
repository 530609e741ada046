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
        from rich import progress as rich
        from rich.console import Console

        tasks: dict[str, rich.TaskID] = {}
        columns = (*rich.Progress.get_default_columns(), rich.TextColumn("{task.fields[far]}"))
        with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bars:

            def update_bar(progress: Progress) -> None:
                if progress.label not in tasks:
                    tasks[progress.label] = bars.add_task(progress.label, total=progress.total, far="")
                bars.update(tasks[progress.label], completed=progress.done, far=str(progress))

            yield update_bar
        return
    last = time.monotonic()

    def print_line(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            print(f"{progress.label}: {progress}", file=sys.stderr, flush=True)

    yield print_line
