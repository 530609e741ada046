"""The energy that the processors of a node and their memory have taken, by the counters that the kernel shows (RAPL)."""

import time
from dataclasses import dataclass
from pathlib import Path

_POLL_INTERVAL = 60.0
"""Seconds between two looks at least: a counter begins anew after some 260 kJ, ten minutes of a busy processor."""
_PREFIXES = {"package": "cpu", "dram": "memory"}
"""What names of counters begin with. Of the others, ``core`` and ``uncore`` are parts of a package, and ``psys`` is all of it."""


@dataclass
class _Counter:
    kind: str
    file: Path
    max_energy: int  # uJ, from which it begins anew
    last: int
    total: int = 0

    def read(self) -> None:
        value = int(self.file.read_text())
        self.total += value - self.last + (self.max_energy if value < self.last else 0)
        self.last = value


class RaplCounters:
    """Joules of this node's processors since construction. ``closed`` names the first counter that this user may not read, which is
    then left out: since 2020 most systems show them to root alone. They are found below ``root``.
    """

    def __init__(self, root: str | Path = "/") -> None:
        self.unreadable = ""
        self._counters: list[_Counter] = []
        self._last_poll = time.monotonic()
        for folder in sorted(Path(root, "sys/class/powercap").glob("intel-rapl:*")):  # of AMD's processors too
            self._open(folder)

    def _open(self, folder: Path) -> None:
        try:
            name = (folder / "name").read_text()
            kind = next((kind for prefix, kind in _PREFIXES.items() if name.startswith(prefix)), None)
            if kind is not None:
                file, max_energy = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())
                self._counters.append(_Counter(kind, file, max_energy, int(file.read_text())))
        except (OSError, ValueError) as error:
            self.unreadable = self.unreadable or f"{folder / 'energy_uj'}: {getattr(error, 'strerror', None) or error}"

    def poll(self) -> None:
        """Look, if it is time: who asks for ``joules`` less often than counters begin anew calls this in between."""
        if self._counters and time.monotonic() - self._last_poll > _POLL_INTERVAL:
            self.joules()

    def joules(self) -> dict[str, float]:
        """``cpu`` and ``memory``, as far as there are counters."""
        self._last_poll = time.monotonic()
        totals: dict[str, float] = {}
        for counter in list(self._counters):
            try:
                counter.read()
            except (OSError, ValueError) as error:  # taken away meanwhile: half a run is no number
                self.unreadable = self.unreadable or f"{counter.file}: {getattr(error, 'strerror', None) or error}"
                self._counters = [other for other in self._counters if other.kind != counter.kind]
        for counter in self._counters:
            totals[counter.kind] = totals.get(counter.kind, 0.0) + counter.total / 1e6
        return totals
