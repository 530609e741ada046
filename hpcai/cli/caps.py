"""`hpcai ablate APP --caps W W ...`: what an app's samples take of energy at several limits on the power of its GPUs.

Every repeat goes over all caps, each time from another one on; each is set, a run that is not counted settles clocks and heat, and
runs of two seconds at least are measured by the meters of the GPUs. Factors are medians of the ratios, within a repeat, to the
limit that was found, with 95 % intervals (bootstrap). The limit that was found is set again at the end.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hpcai.cli.bench.timing import interval, orders, wait
from hpcai.dist import Mesh
from hpcai.dist.collect import gather_objects
from hpcai.dist.power import Limit

MEASURED = 2.0  # seconds at least: a meter counts in tens of milliseconds
MANY = 5


def measured(
    trial: Callable[[], AbstractContextManager[Any]], mesh: Mesh, asked: Sequence[float], repeats: int, steps: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """``caps``: a row for each, the limit that was found first. Raises ConfigError where there is no GPU or a cap is refused."""
    with closing(Limit(mesh.device)) as limit:
        caps = chosen(limit, asked)
        for cap in caps:  # what is refused is refused before anything is built
            limit.hold(cap)
        tell("building")
        with trial() as training, training.around():
            for _ in range(2):  # the first compiles, the second says how long one takes
                began = _now(mesh)
                training.run(steps)
            count = max(1, math.ceil(MEASURED / (_now(mesh) - began)))
            found: dict[float, list[tuple[float, float]]] = {cap: [] for cap in caps}
            for repeat, order in enumerate(orders(len(caps), repeats)):
                for cap in (caps[number] for number in order):
                    tell(f"repeat {repeat + 1} of {repeats}: {cap:g} W")
                    limit.hold(cap)
                    training.run(steps)
                    found[cap].append(_taken(training, limit, mesh, steps, count))
        limit.hold(caps[0])
    samples = training.samples * steps * count
    return {"caps": [_row(cap, found[cap], found[caps[0]], samples, mesh.world) for cap in caps], "runs": count}


def chosen(limit: Limit, asked: Sequence[float]) -> list[float]:
    """The limit that was found, and those asked for, or some down to the lowest."""
    found, (low, _) = limit.former, limit.range
    return list(dict.fromkeys([found, *(asked or np.linspace(found, low, MANY).round().tolist()[1:])]))


def _now(mesh: Mesh) -> float:
    """Seconds on the first process, once the GPUs of all have done what they were asked to."""
    wait()
    return gather_objects(time.perf_counter(), mesh.everyone)[0]


def _taken(training: Any, limit: Limit, mesh: Mesh, steps: int, count: int) -> tuple[float, float]:
    """Seconds, and joules of all GPUs."""
    began, before = _now(mesh), limit.joules
    for _ in range(count):
        training.run(steps)
    seconds = _now(mesh) - began
    return seconds, sum(gather_objects(limit.joules - before, mesh.everyone))


def _row(cap: float, own: list[tuple[float, float]], base: list[tuple[float, float]], samples: int, gpus: int) -> dict[str, Any]:
    (seconds, joules), pairs = np.median(own, 0).tolist(), list(zip(own, base))
    return {
        "cap_w": cap, "watts": joules / seconds / gpus,
        "samples_per_second": samples / seconds, "samples_per_joule": samples / joules,
        "speed": interval([b / a for (a, _), (b, _) in pairs]), "energy": interval([b / a for (_, a), (_, b) in pairs]),
        "each": [[round(value, 4) for value in pair] for pair in own],
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    where = "{ablate} on {processes} x {device}, torch {torch}; {repeats} repeats of {runs} runs of {steps} steps".format(**found)
    caption = f"samples a joule and a second: times those at {found['caps'][0]['cap_w']:g} W, the limit that was found"
    table = Table(title=where, caption=caption)
    for name in ("cap W", "samples/s", "times", "W a GPU", "samples/J", "times"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["caps"]:
        speed, energy = ("{median:.2f} ({low:.2f} to {high:.2f})".format(**row[of]) for of in ("speed", "energy"))
        rates = [f"{row[of]:.4g}" for of in ("samples_per_second", "samples_per_joule")]
        table.add_row(f"{row['cap_w']:g}", rates[0], speed, f"{row['watts']:.0f}", rates[1], energy)
    console = Console()
    console.width = max(console.width, 132)
    console.print(table)
