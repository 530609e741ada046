"""Data sheets of GPUs (gpus.toml)."""

import tomllib
from pathlib import Path
from typing import Any

SHEETS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
