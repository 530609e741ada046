"""Background threads for saving, evaluation and rollouts during training."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def submit(function: Callable[[], T], name: str, after: "Future[T] | None" = None) -> "Future[T]":
    """Run ``function`` in a daemon thread and return its future. The thread waits until ``after`` is done, if it is given."""
    future: Future[T] = Future()

    def run() -> None:
        # The outermost autocast clears a cache on exit, under a lock that the main thread may hold while it waits for the
        # interpreter lock of this one (torch 2.13, tracing for torch.compile). With nesting raised, none is the outermost here.
        torch.autocast_increment_nesting()
        try:
            if after is not None:
                after.exception()
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
