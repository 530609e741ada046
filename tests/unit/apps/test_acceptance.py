"""Acceptance runs: each app declares three, whose data makers, settings and published rates exist."""

import argparse
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hpcai import config

ROOT = Path(__file__).resolve().parents[3]
APPS = sorted(path.parent.name for path in (ROOT / "apps").glob("*/__main__.py"))
KEYS = {"prepare", "config", "overrides"}
OPTIONAL = {"small": {"expected", "before", "mlperf"}, "target": {"before"}, "scaling": {"batch", "before", "published", "unit"}}
PARTS = {"checkpoint", "resume"}


class ParsedError(Exception):
    """The command line was accepted."""


@pytest.fixture(params=APPS)
def runs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The file of one app, with the app as a further entry."""
    return tomllib.loads((ROOT / f"apps/{request.param}/acceptance.toml").read_text()) | {"app": request.param}


def fill(text: str, ranks: int, batch: int = 1) -> str:
    values = {"data": "data", "ranks": ranks, "batch": batch * ranks, "samples": 2 * batch * ranks}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def load(app: str, name: str, overrides: list[str]) -> Any:
    return config.load(import_module(f"apps.{app}.settings").Config, ROOT / f"apps/{app}/configs/{name}", overrides)


def test_tables_and_keys(runs: dict[str, Any]) -> None:
    rates = ROOT / f"apps/{runs.pop('app')}/published.toml"
    assert {*runs} - PARTS == {*OPTIONAL}
    for name, table in ((name, runs[name]) for name in OPTIONAL):
        assert KEYS <= {*table} <= KEYS | OPTIONAL[name], name
    assert all(relative >= 0.02 and value for value, relative in runs["small"]["expected"].values())
    assert any(item.startswith("train.target=") for item in runs["target"]["overrides"])
    assert runs["scaling"]["batch"] > 0
    if published := runs["scaling"].get("published"):
        assert published in tomllib.loads(rates.read_text())["rates"]
    assert ("mlperf" in runs["small"]) == ("report.sinks=[terminal, mlperf]" in runs["small"]["overrides"])


@pytest.mark.parametrize("ranks", [1, 4, 64, 128])
def test_settings_are_valid(runs: dict[str, Any], ranks: int) -> None:
    for part in (runs[name] for name in PARTS & runs.keys()):
        overrides = [*runs["small"]["overrides"], *part["overrides"], *part.get("gpu", [])]
        assert load(runs["app"], runs["small"]["config"], [fill(item, ranks) for item in overrides]).train.target is not None
    for name in OPTIONAL:
        table, batch = runs[name], runs[name].get("batch", 1)
        cfg = load(runs["app"], table["config"], [fill(item, ranks, batch) for item in table["overrides"]])
        assert (cfg.train.target is not None) or name != "target"
        for command in table.get("before", []):
            app, yaml, *overrides = command.split()
            load(app, yaml, [fill(item, ranks, batch) for item in overrides])


def test_makers_accept_their_options(runs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: Any) -> None:
        parse(self, *args)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    for name in OPTIONAL:
        for command in runs[name]["prepare"]:
            maker, *words = fill(command, 4, runs[name].get("batch", 1)).split()
            with pytest.raises(ParsedError):
                import_module(f"data_prep.{maker}").main(words)
