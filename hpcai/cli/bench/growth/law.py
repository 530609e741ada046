"""How a number grows with n: the simplest of a, a + c log2 n, a + b n, a + b n + c log2 n that fits. Neither b nor c is below 0."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CHOICES = ((), ("log",), ("line",), ("line", "log"))  # simplest first


@dataclass(frozen=True)
class Law:
    """``base + line n + log log2 n``. ``holds``: all numbers are within what they may be off. ``level``: of those only that they no
    longer change is believed."""

    base: float
    line: float = 0.0
    log: float = 0.0
    holds: bool = True
    level: bool = False

    def at(self, n: float) -> float:
        return self.base + self.line * n + self.log * math.log2(n)

    def __str__(self) -> str:
        if self.level:
            return f"levels off at {short(self.base)}"
        terms = [short(self.base)] if self.base or not (self.line or self.log) else []
        terms += [f"{short(factor)} {name}" for factor, name in ((self.line, "n"), (self.log, "log n")) if factor]
        return ("" if self.holds else "about ") + " + ".join(terms)


def fit(ns: Sequence[int], values: Sequence[float], part: float = 0.0, units: float = 0.5) -> Law:
    """The law of ``values`` at ``ns``, each of which may be off by ``units`` and ``part`` of itself. Where these are not all
    alike, but the last two are (within a tenth of that), or they never rose, they are taken to stay where they are."""
    given = np.asarray(values, float)
    allowed = units + part * np.abs(given)
    found = Law(float(given.mean()))
    for terms in _CHOICES[: len(given)]:
        found = _least_squares(ns, given, allowed, terms)
        if found.holds:
            return found
        if not terms and len(given) > 2 and _levels(given, allowed):
            return Law(float(given[-1]), level=True)
    return found


def _levels(given: np.ndarray, allowed: np.ndarray) -> bool:
    rises = np.diff(given)
    falls = bool((rises <= allowed[1:]).all()) and given[-1] < given[0] - allowed[0]
    return falls or bool(abs(rises[-1]) <= allowed[-1] / 10)


def _least_squares(ns: Sequence[int], given: np.ndarray, allowed: np.ndarray, terms: Sequence[str]) -> Law:
    """With these terms, without those whose factor would be below 0."""
    count = np.asarray(ns, float)
    columns = [np.ones_like(count), *({"line": count, "log": np.log2(count)}[term] for term in terms)]
    factors = np.linalg.lstsq(np.stack(columns, 1) / allowed[:, None], given / allowed, rcond=None)[0]
    for term, factor in zip(terms, factors[1:]):
        if factor < 0:
            return _least_squares(ns, given, allowed, [other for other in terms if other != term])
    factors[np.abs(factors) < 1e-9 * np.abs(given).max()] = 0.0
    off = np.abs(np.stack(columns, 1) @ factors - given)
    named = dict(zip(terms, factors[1:].tolist()))
    return Law(float(factors[0]), **named, holds=bool((off <= allowed).all()))


def short(number: float) -> str:
    """Three digits, with thousands."""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    text = f"{number:.3g}"
    return "0" if float(text) == 0 else text
