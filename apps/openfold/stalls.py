"""How long steps wait for chains of which a few percent take seconds:  hpcai bench openfold stalls"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcai.plan.loader import heavy_tail, room, waits

if TYPE_CHECKING:  # worker processes read this file too, and begin sooner without torch
    from hpcai.cli.bench.timing import Row

_FASTER = 4  # so many times shorter is all that is measured: 1 % of a step still is more than handing over a batch takes
_LEAST = 0.01  # of a step: one that waits less does not count
_EPOCH = 40  # batches: MLPerf HPC evaluates after so many at a batch of 128
_SECONDS = 30  # of the measurements, which are made at the same time: nearly all of it is sleep
_WORKERS, _PREFETCH = 8, 1e9  # of the files of settings for MLPerf's runs
_INITIAL, _FINETUNING = 54_147_216, 332_155_024  # bytes of a sample of each training, with its passes
_COPIES = 1, 8, 256
_TAILS = (1.0, 10.0), (1.0, 60.0)

_Begin = Callable[[], Iterator[Any]]


class Case(NamedTuple):
    """Seconds of a step in MLPerf HPC v3.0 (NVIDIA Eos, weak scaling), each protein on so many GPUs, and bytes of a sample."""

    name: str
    step: float
    sample: int
    processes: bool

    @property
    def ahead(self) -> int:
        return room(_WORKERS, 1, _PREFETCH, self.sample)

    @property
    def epochs(self) -> int:
        return max(round(_SECONDS * _FASTER / self.step / _EPOCH), 1)


_CASES = (
    Case("1 way", 1.81, _INITIAL, True), Case("8 ways", 0.68, _INITIAL, False), Case("8 ways, few ahead", 0.68, _FINETUNING, True),
)  # fmt: skip


def stalls(cfg: Any, repeats: int) -> "list[Row]":
    """Share of the steps that wait longer than 1 % of a step, share of the time that is waited, and the longest wait in steps, for
    samples that take times of ``hpcai.plan.loader.heavy_tail`` and only sleep, all of it a quarter as long: with our Loader in both
    orders, with nothing to prepare (what is lost on this machine anyway) and with torch's DataLoader, all at the same time; beside
    each of ours what ``hpcai.plan.loader.waits`` says. The first step of a run is left out.

    Then that alone for 1, 8 and 256 copies, whose steps begin together: also where 8 processes of a copy make its samples in turn,
    and for a tail to 60 s. Here the first epoch is left out, where copies wait until all of them have samples ahead."""
    times = [heavy_tail(np.random.default_rng(1), case.epochs * _EPOCH) for case in _CASES]
    rows: list[Row] = []
    for case, own, found in zip(_CASES, times, _measured(times)):
        for name, waited in found.items():
            order: Any = name
            row: Row = {"case": case.name, "step_s": case.step, "copies": 1, "ahead": case.ahead, "tail_s": 10.0, "loader": name}
            rows.append(row | told(waited[1:], case.step))
            if name in ("strict", "ready"):
                computed = waits(own, case.step, _WORKERS, case.ahead, order, epoch=_EPOCH)[1:]
                rows[-1] |= {f"computed_{what}": value for what, value in told(computed, case.step).items()}
    for tail in _TAILS:
        for case, makers in ((_CASES[0], 1), (_CASES[1], 1), (_CASES[1], 8), (_CASES[2], 1), (_CASES[2], 8)):
            rows += [_together(case, makers, tail, copies) for copies in _COPIES]
    return rows


def told(waited: np.ndarray, step: float) -> "Row":
    """The shares of steps and of time that were waited, and the longest wait in steps."""
    shares = {"steps": (waited > _LEAST * step).mean(), "time": waited.sum() / (waited.sum() + step * len(waited))}
    longest = round(float(waited.max()) / step, 2)
    return {**{f"of_{name}": round(float(share), 4) for name, share in shares.items()}, "longest": longest}


def _together(case: Case, makers: int, tail: tuple[float, float], copies: int) -> "Row":
    times = heavy_tail(np.random.default_rng(1), (copies, 10 * _EPOCH), tail=tail)
    row: Row = {"case": case.name, "step_s": case.step, "copies": copies, "ahead": case.ahead, "makers": makers, "tail_s": tail[1]}
    orders: tuple[Any, ...] = "strict", "ready"
    for order in orders:
        found = waits(times, case.step, _WORKERS, case.ahead, order, epoch=_EPOCH, makers=makers)[_EPOCH:]
        row |= {f"{order}_{name}": value for name, value in told(found, case.step).items()}
    return row


def _measured(times: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Seconds that each step of each case waited, as many times longer as all was shortened, by the name of the loader."""
    with ExitStack() as held:
        forms: list[dict[str, _Begin]] = [{"torch": _by_torch(own, held)} for own in times]  # it forks, while there are no threads
        for case, own, form in zip(_CASES, times, forms):
            form |= {order: _by_ours(case, own, order, held) for order in ("strict", "ready")}
            form["nothing to prepare"] = _by_ours(case._replace(processes=False), np.zeros_like(own), "strict", held)
        with ThreadPoolExecutor(sum(map(len, forms))) as pool:
            begun = [{name: pool.submit(_consume, begin, case.step / _FASTER) for name, begin in form.items()}
                     for case, form in zip(_CASES, forms)]  # fmt: skip
            return [{name: _FASTER * np.array(each.result()) for name, each in form.items()} for form in begun]


def _consume(begin: _Begin, step: float) -> list[float]:
    waited, batches = list[float](), begin()
    while True:
        began = time.perf_counter()
        if next(batches, None) is None:
            return waited
        waited.append(time.perf_counter() - began)
        time.sleep(step)


class Sleeping:
    """Samples that take ``times`` to prepare, an epoch after the other, and nothing in epoch 0.   [epochs * _EPOCH]"""

    def __init__(self, times: np.ndarray) -> None:
        self.times = times / _FASTER

    def __len__(self) -> int:
        return _EPOCH

    def sample(self, index: int, epoch: int) -> np.ndarray:
        if epoch:
            time.sleep(self.times[(epoch - 1) * _EPOCH + index])
        return np.array(index)

    def describe(self, index: int) -> str:
        return f"sample {index}"

    def __getitem__(self, number: int) -> int:
        """For torch, as all of them were one epoch, after -1 for nothing."""
        time.sleep(0 if number < 0 else self.times[number])
        return number


def _by_ours(case: Case, times: np.ndarray, order: Any, held: ExitStack) -> _Begin:
    from hpcai import dist
    from hpcai.data.assemble import tree_bytes
    from hpcai.data.loader import Loader

    source = Sleeping(times)
    words = {"workers": _WORKERS, "processes": case.processes, "prefetch": case.ahead * tree_bytes(source.sample(0, 0))}
    loader = held.enter_context(Loader(source, 1, dist.alone(), name=order, shuffle=False, order=order, **words))  # type: ignore[arg-type]
    for _ in loader.epoch(0):  # until all workers have begun
        pass
    last = len(times) // _EPOCH
    return lambda: (batch for epoch in range(1, last + 1) for batch in loader.epoch(epoch, more=epoch < last))


def _by_torch(times: np.ndarray, held: ExitStack) -> _Begin:
    from torch.utils.data import DataLoader

    numbers = [-1] * (2 * _WORKERS)
    loader: Any = DataLoader(Sleeping(times), sampler=numbers, num_workers=_WORKERS, persistent_workers=True)  # type: ignore[arg-type]
    for _ in loader:
        pass
    numbers[:] = range(len(times))
    held.callback(lambda: loader._iterator._shutdown_workers())
    return lambda: iter(loader)
