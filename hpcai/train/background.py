"""Threads beside the training."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def submit(function: Callable[[], T], name: str, after: "Future[T] | None" = None) -> "Future[T]":
    """``function()`` in a thread that does not keep the process alive, once ``after`` is done."""
    future: Future[T] = Future()

    def run() -> None:
        # When the outermost autocast ends it clears a cache, under a lock that the main thread may hold while it waits for the
        # interpreter lock of this one (torch 2.13, tracing for torch.compile). So no autocast is the outermost here.
        torch.autocast_increment_nesting()
        try:
            if after is not None:
                after.exception()
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
