"""Energy of the processors of a node and of their memory, from the kernel's RAPL counters."""

import time
from dataclasses import dataclass
from pathlib import Path

_POLL_INTERVAL = 60.0
"""Seconds. A counter wraps around after about 260 kJ, ten minutes of a busy processor."""
_PREFIXES = {"package": "cpu", "dram": "memory"}
"""Prefixes of names of counters. Of the other counters, ``core`` and ``uncore`` are parts of a package, ``psys`` contains it."""


@dataclass
class _Counter:
    kind: str
    file: Path
    max_energy: int  # uJ; then the counter wraps around
    last: int
    total: int = 0

    def read(self) -> None:
        value = int(self.file.read_text())
        self.total += value - self.last + (self.max_energy if value < self.last else 0)
        self.last = value


class RaplCounters:
    """Energy of this node's processors since construction, from the counters below ``root``. ``unreadable`` names the first counter
    without read permission, which is omitted: since 2020 most systems show them to root only."""

    def __init__(self, root: str | Path = "/") -> None:
        self.unreadable = ""
        self._counters: list[_Counter] = []
        self._last_poll = time.monotonic()
        for folder in sorted(Path(root, "sys/class/powercap").glob("intel-rapl:*")):  # also on AMD processors
            file = folder / "energy_uj"
            try:
                name = (folder / "name").read_text()
                kind = next((kind for prefix, kind in _PREFIXES.items() if name.startswith(prefix)), None)
                if kind is not None:
                    max_energy = int((folder / "max_energy_range_uj").read_text())
                    self._counters.append(_Counter(kind, file, max_energy, int(file.read_text())))
            except (OSError, ValueError) as error:
                self.unreadable = self.unreadable or f"{file}: {getattr(error, 'strerror', None) or error}"

    def poll(self) -> None:
        """Read the counters if ``_POLL_INTERVAL`` has passed, for callers of ``joules`` that are rarer than a wrap-around."""
        if self._counters and time.monotonic() - self._last_poll > _POLL_INTERVAL:
            self.joules()

    def joules(self) -> dict[str, float]:
        """Return joules of ``cpu`` and ``memory``, as far as there are counters."""
        self._last_poll = time.monotonic()
        totals: dict[str, float] = {}
        for counter in list(self._counters):
            try:
                counter.read()
            except (OSError, ValueError) as error:  # removed meanwhile: the energy of half a run is no result
                self.unreadable = self.unreadable or f"{counter.file}: {getattr(error, 'strerror', None) or error}"
                self._counters = [other for other in self._counters if other.kind != counter.kind]
        for counter in self._counters:
            totals[counter.kind] = totals.get(counter.kind, 0.0) + counter.total / 1e6
        return totals
