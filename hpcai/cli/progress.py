"""How far a long work is, on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hpcai.log import size

EVERY = 10.0  # seconds between two lines


class Progress(NamedTuple):
    """How far the work named ``label`` is; ``unit`` is bytes, files or rows."""

    label: str
    done: int
    total: int
    unit: str

    def __str__(self) -> str:
        if self.unit == "bytes":
            return f"{size(self.done)} of {size(self.total)}"
        return f"{self.done:,} of {self.total:,} {self.unit}"


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """A function that shows a ``Progress``, by a bar for each label or by lines."""
    if sys.stderr.isatty():
        with _bars() as show:
            yield show
        return
    last = time.monotonic()

    def tell(now: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            print(f"{now.label}: {now}", file=sys.stderr, flush=True)

    yield tell


@contextmanager
def _bars() -> Iterator[Callable[[Progress], None]]:
    from rich import progress as rich
    from rich.console import Console

    columns = (*rich.Progress.get_default_columns(), rich.TextColumn("{task.fields[far]}"))
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, rich.TaskID] = {}

        def show(now: Progress) -> None:
            if now.label not in tasks:
                tasks[now.label] = bars.add_task(now.label, total=now.total, far="")
            bars.update(tasks[now.label], completed=now.done, far=str(now))

        yield show
