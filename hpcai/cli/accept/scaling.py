"""Samples per second by number of GPUs, as `hpcai plan` predicts them."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from hpcai import __version__
from hpcai.cli.plan.planner import Planner
from hpcai.cli.report.run import describe_error
from hpcai.errors import ConfigError, HpcaiError
from hpcai.json_file import read_object
from hpcai.plan import machines

Settings = tuple[str, tuple[str, ...]]
"""a file in an app's folder ``configs`` ("": that of its plan), and overrides of it"""
DEFAULT: Settings = ("", ())
EACH = 25.0  # seconds; that of openfold takes minutes, all others less


def curve(
    app: str, mode: str, gpus: Sequence[int], machine: str, batch: int, settings: Settings = DEFAULT
) -> list[tuple[int, float]]:
    """Return numbers of GPUs with the samples per second that `hpcai plan` predicts for them. ``batch`` is that of a rank in the
    mode ``weak``, of the job in ``strong``. Numbers that do not divide the batch, or whose memory is too small, are left out."""
    rates = ((count, _rate(app, machine, count, batch * count if mode == "weak" else batch, settings)) for count in gpus)
    return [(count, rate) for count, rate in rates if rate]


@cache
def _planner(app: str, settings: Settings) -> Planner:
    planner, (yaml, overrides) = Planner(app), settings
    default = Path(planner.yaml)
    return planner if not overrides and yaml in ("", default.name) else Planner(app, overrides, default.with_name(yaml))


def _rate(app: str, machine: str, gpus: int, batch: int, settings: Settings) -> float | None:
    with suppress(ConfigError):  # an app without a plan, or settings that no plan has
        planner = _planner(app, settings)
        on = machines.find_machine(machine, slowdown=planner.slowdown)
        for ways in planner.ways:  # the fewest that fit the memory
            with suppress(ConfigError):
                fit, loader = planner.plan_step(gpus, ways, batch, on)
                return batch / (fit.step.seconds + loader)
    return None


class Curves:
    """Curves on one machine: kept in the JSON file ``path``, and computed for at most ``seconds`` in all, and EACH for an app."""

    def __init__(self, path: Path, machine: str, report: Callable[[str], object], seconds: float = 60.0) -> None:
        self.path, self.machine, self.report, self.end = path, machine, report, time.monotonic() + seconds
        self.known: dict[str, Any] = {}
        with suppress(HpcaiError):
            self.known = read_object(path, "the points of curves") if path.exists() else {}
        self.ends: dict[str, float] = {}
        self.problems: dict[str, str] = {}

    def curve(self, app: str, mode: str, gpus: Sequence[int], batch: int, settings: Settings = DEFAULT) -> list[tuple[int, float]]:
        """Return ``curve`` without the points for which there was no time. ``problems`` tells why points of an app are missing."""
        points, end = [], self.ends.setdefault(app, min(time.monotonic() + EACH, self.end))
        for count in gpus:
            key = json.dumps([__version__, app, mode, self.machine, batch, count, settings])
            if key not in self.known and app not in self.problems:
                self.report(f"hpcai plan {app}: {mode} scaling, {count:,} {self.machine}")
                try:
                    _planner(app, settings).report = partial(_check_time, end)
                    self.known[key] = curve(app, mode, [count], self.machine, batch, settings)
                except TimeoutError:
                    self.problems[app] = f"its whole curve takes longer than {EACH:.0f} s, hpcai plan {app} computes it"
                except Exception as error:  # anything that an app's code raises; the page is still drawn
                    self.problems[app] = describe_error(error)
            points += [(int(n), float(rate)) for n, rate in self.known.get(key, ())]
        self.path.write_text(json.dumps(self.known), encoding="utf-8")
        return points


def _check_time(end: float, text: str) -> None:
    if time.monotonic() > end:
        raise TimeoutError(text)
