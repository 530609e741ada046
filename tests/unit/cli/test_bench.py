"""`hpcai bench`: names, parts, JSON, and alternation of runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpcai.cli import apps, bench
from hpcai.cli.bench import app, timing

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["model.size=32", "model.filters=2", "data.batch=1"]


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert bench.main([*words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_names_are_those_of_apps_and_shared_components(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    shown = capsys.readouterr().out
    names = apps.with_part("benchmarks")
    assert f"data, gpu, {', '.join(names)}" in shown and {"cosmoflow", "llm"} < {*names}
    assert bench.main(["chess"]) == 2 and "there is no 'chess'; expected one of data" in capsys.readouterr().err


@pytest.mark.parametrize("name, known", [("data", "direct, peers"), ("cosmoflow", "steps, memory")])
def test_an_unknown_part_is_refused(name: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([name, "capturing"])
    shown = capsys.readouterr().err
    assert "there is no part 'capturing'" in shown and known in shown


def test_parts_are_measured_and_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main(["data", "peers", "--repeats", "1", "--gib", "0.01", "--threads", "1", "--directory", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["peers"]
    assert [row["loader"] for row in rows] == ["ours", "torch DataLoader", "h5py alone"] * 2 and rows[0]["ours_over_it"] == 1
    assert [row["sample_mb"] for row in rows] == [16.8] * 3 + [56.6] * 3
    for ours, *others in (rows[:3], rows[3:]):
        assert all(other["ours_over_it"] == pytest.approx(ours["mb_s"] / other["mb_s"], rel=0.1, abs=0.01) for other in others)
    assert lines[0].startswith("peers: data") and "ours over it" in "".join(lines[1:5]) and list(tmp_path.iterdir()) == []


def test_every_shared_part_of_an_app(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def here(words: list[str], environ: dict[str, str]) -> Any:
        asked.append(words)
        assert bench.main(words) == 0
        return {"mb": json.loads(capsys.readouterr().out)["mb"] * (0.5 if words[-1] == "ours" else 1.0)}

    monkeypatch.setattr(app, "run_in_subprocess", here)  # without processes, which take ten seconds each
    found = measured(capsys, "cosmoflow", *SMALL, "--repeats", "1", "--precision", "fp32", "auto")
    row = found["steps"][0]
    assert row["case"] == "size 32, filters 2, batch 1" and row["precision"] == "fp32" and found["steps"][1]["precision"] == "auto"
    assert row["plain_over_ours"] == pytest.approx(row["plain_s"] / row["ours_s"], rel=0.05)
    memory = found["memory"][0]
    assert memory["ours_over_plain"] == pytest.approx(memory["ours_mb"] / memory["plain_mb"], abs=0.01)
    assert [words[1] for words in asked] == ["memory"] * 2 and all(words[2:5] == SMALL and words[-2] == "--peak" for words in asked)


def test_a_ratio_above_1_is_in_our_favour() -> None:
    assert app.timing_row({"plain": 3.0, "peer": 6.0, "ours": 1.5}) == {
        "plain_s": 3.0, "peer_s": 6.0, "ours_s": 1.5, "plain_over_ours": 2.0, "peer_over_ours": 4.0,
    }  # fmt: skip


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    words = ["model.filters=[2, 4]", "model.window=[16, 16, 16]", "--repeats", "1", "--peers"]
    found = measured(capsys, "unet3d", "steps", *words)
    assert "monai (pip install 'hpcai-suite[peers]')" in found["left_out"]["left out"] and "monai_s" not in found["steps"][0]
    assert {"plain_s", "channels_last_s", "ours_s"} <= set(found["steps"][0])


def test_runs_alternate_after_a_warmup() -> None:
    seen: list[str] = []
    now = [0.0]

    def run(name: str, seconds: float) -> None:
        now[0] += seconds if seen.count(name) >= 2 else 100.0
        seen.append(name)

    runs = {"a": lambda: run("a", 1.0), "b": lambda: run("b", 2.0)}
    assert timing.alternate(runs, 1, clock=lambda: now[0]) == {"a": 1.0, "b": 2.0} and seen == ["b", "a", "a", "b", "b", "a"]
