"""A stand-in of the child processes that read files for `hpcai data check`: each takes a second of CPU time to start."""

from collections.abc import Callable
from typing import Any

from hpcai.cli.check import pool
from hpcai.errors import DataError


class InlineWorker:
    """A worker in the process of the test."""

    def __init__(self, *args: Any) -> None:
        pass

    def call(self, task: pool.Task, *args: Any, advance: Callable[[int], None]) -> Any:
        result = None
        try:
            for result in task(*args):
                if isinstance(result, int):
                    advance(result)
        except Exception as error:
            raise error if isinstance(error, DataError) else DataError(f"{type(error).__name__}: {error}") from error
        return result

    def kill(self, stop: bool = False) -> None:
        pass
