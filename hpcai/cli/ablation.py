"""The arrangements of switches that `hpcai ablate` measures."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hpcai import dist
from hpcai.cli.bench.timing import bootstrap_interval, describe_error, rotated_orders, synchronize
from hpcai.cli.benchmarks import Enabled, Switch
from hpcai.data.readers import available_memory
from hpcai.dist.collectives import all_gather_object
from hpcai.errors import ConfigError


def select_switches(switches: Sequence[Switch], only: Sequence[str]) -> list[str]:
    """Return the names of the switches to measure, in their order. Raises ConfigError for one that is unknown or not available."""
    known = {_key(switch.name): switch for switch in switches}
    for name in only:
        if _key(name) not in known:
            raise ConfigError(f"--only: there is no switch {name!r}; expected some of {', '.join(known)}")
        if reason := known[_key(name)].why_not:
            raise ConfigError(f"--only: {name!r} cannot be switched on here: {reason}")
    requested = {_key(name) for name in only} or set(known)
    return [switch.name for key, switch in known.items() if key in requested and switch.why_not is None]


def _key(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")


@dataclass
class Arrangement:
    """A set of enabled switches: seconds of a step in each repeat, and differences from the plain implementation."""

    enabled: Enabled
    times: list[float] = field(default_factory=list)
    samples: int = 0
    differences: dict[str, float | None] = field(default_factory=dict)
    peak: int | None = None  # bytes on the GPU
    error: str | None = None
    training: Any = None
    exit_stack: ExitStack = field(default_factory=ExitStack)


class Ablation:
    """Measures ``training(enabled)`` with no switch, with the first 1, 2, ... of ``names``, and with all but one of them."""

    def __init__(
        self, training: Callable[[Enabled], AbstractContextManager[Any]], names: list[str], mesh: dist.Mesh, steps: int,
    ) -> None:  # fmt: skip
        self.training, self.names, self.mesh, self.steps = training, names, mesh, steps
        self.added = [frozenset(names[:count]) for count in range(len(names) + 1)]
        self.left_out = [frozenset(names) - {name} for name in names]
        self.arrangements = {enabled: Arrangement(enabled) for enabled in (*self.added, *self.left_out)}
        self.keep_in_memory, self._gpu = True, mesh.device.type == "cuda"
        self._free_at_start, self._reference = self._free_bytes(), (math.nan, torch.tensor(math.nan))  # kept if plain fails

    def run(self, repeats: int, report: Callable[[str], None]) -> None:
        every = list(self.arrangements.values())
        try:
            for arrangement in every:
                names = ", ".join(name for name in self.names if name in arrangement.enabled)
                report(f"building, of {len(every)} arrangements: {names or 'plain'}")
                self._attempt(arrangement, self._measure_first)
            for repeat, order in enumerate(rotated_orders(len(every), repeats)):
                report(f"repeat {repeat + 1} of {repeats}")
                gc.collect()
                for index in order:
                    self._attempt(every[index], self._measure_again)
        finally:
            self._close(*every)

    def _attempt(self, arrangement: Arrangement, function: Callable[[Arrangement], None]) -> None:
        try:
            if arrangement.error is None:
                function(arrangement)
        except Exception as error:  # of any kind: the other arrangements are still measured,
            if self.mesh.world > 1:  # unless other ranks are inside a collective
                raise
            arrangement.error = describe_error(error)
        if arrangement.error is not None or not self.keep_in_memory:
            self._close(arrangement)

    def _close(self, *arrangements: Arrangement) -> None:
        for arrangement in arrangements:
            arrangement.training = None
            with suppress(Exception):
                arrangement.exit_stack.close()
        if self._gpu:
            gc.collect()

    def _measure_first(self, arrangement: Arrangement) -> None:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        arrangement.training = arrangement.exit_stack.enter_context(self.training(arrangement.enabled))
        arrangement.samples = arrangement.training.samples
        loss, gradient = arrangement.training.loss_and_gradient()
        if not arrangement.enabled:
            self._reference = loss, gradient
        base_loss, base_gradient = self._reference
        differences = {"loss": abs(loss - base_loss) / (abs(base_loss) or 1.0)}
        differences["gradient"] = float((gradient - base_gradient).norm() / base_gradient.norm())
        arrangement.differences = {quantity: value if math.isfinite(value) else None for quantity, value in differences.items()}
        self._step_seconds(arrangement)
        if self._gpu:  # a captured step allocates nothing afterwards
            arrangement.peak = torch.cuda.max_memory_allocated() - before
        if any(all_gather_object(self._free_bytes() < self._free_at_start / 2, self.mesh.peers)):
            self.keep_in_memory = False
            self._close(*self.arrangements.values())

    def _measure_again(self, arrangement: Arrangement) -> None:
        if arrangement.training is None:
            arrangement.training = arrangement.exit_stack.enter_context(self.training(arrangement.enabled))
            self._step_seconds(arrangement)
        arrangement.times.append(self._step_seconds(arrangement))

    def _step_seconds(self, arrangement: Arrangement) -> float:
        """Return the seconds of a step on the slowest rank."""
        with arrangement.training.context():
            self._barrier()
            start = time.perf_counter()
            arrangement.training.run(self.steps)
            self._barrier()
            seconds = (time.perf_counter() - start) / self.steps
        return float(max(all_gather_object(seconds, self.mesh.peers)))

    def _barrier(self) -> None:
        synchronize()
        all_gather_object(None, self.mesh.peers)

    def _free_bytes(self) -> int:
        """Return the free bytes of GPU memory, or of host memory on a CPU."""
        if not self._gpu:
            return available_memory()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows ``cumulative``, from none to all switches, and ``left_out``."""
        added = [self._row(name, on, self.added[0]) for name, on in zip(["plain", *self.names], self.added)]
        return {"cumulative": added, "left_out": [self._row(n, on, self.added[-1]) for n, on in zip(self.names, self.left_out)]}

    def _row(self, name: str, enabled: Enabled, baseline: Enabled) -> dict[str, Any]:
        """Return a row; its factor is the speedup over no switch, or the slowdown relative to all."""
        measured, base = self.arrangements[enabled], self.arrangements[baseline]
        row: dict[str, Any] = {"name": name, "on": [n for n in self.names if n in enabled], "error": measured.error}
        if measured.error is not None:
            return row
        pairs = list(zip(measured.times, base.times))
        ratios = [b / a if baseline == self.added[0] else a / b for a, b in pairs] if base.error is None else []
        seconds = float(np.median(measured.times))
        row |= {"seconds": seconds, "each": [round(value, 6) for value in measured.times]}
        row |= {"factor": bootstrap_interval(ratios) if ratios else None, "samples_per_second": measured.samples / seconds}
        row["peak_bytes"] = measured.peak
        return row | {f"{quantity}_difference": measured.differences.get(quantity) for quantity in ("loss", "gradient")}
