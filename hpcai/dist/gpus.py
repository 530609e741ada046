"""Data sheets of GPUs (gpus.toml)."""

import tomllib
from pathlib import Path
from typing import Any

SHEETS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))


def find_peak_flops(name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of dense matrix products of the GPU that CUDA calls ``name``, or None if it is not known."""
    rates = (sheet["tflops"].get(precision) for sheet in SHEETS.values() if name in sheet["names"])
    return next((rate * 1e12 for rate in rates if rate), None)
