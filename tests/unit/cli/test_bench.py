"""`hpcai bench`: names, parts, JSON, and alternation of runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpcai.cli import apps, bench, main
from hpcai.cli.bench import app, timing

SMALL = ["model.size=32", "model.filters=2", "data.batch=1"]


def run_bench(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert bench.main([*args, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_names_are_those_of_apps_and_shared_components(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    stdout = capsys.readouterr().out
    names = apps.with_part("benchmarks")
    assert f"data, gpu, {', '.join(names)}" in stdout and {"cosmoflow", "llm"} < {*names}
    assert main(["bench", "chess"]) == 2 and "hpcai bench: there is no 'chess'; expected one of data" in capsys.readouterr().err


@pytest.mark.parametrize("name, parts", [("data", "direct, rows, peers"), ("cosmoflow", "steps, memory")])
def test_an_unknown_part_is_refused(name: str, parts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([name, "capturing"])
    stderr = capsys.readouterr().err
    assert "there is no part 'capturing'" in stderr and parts in stderr


def test_parts_are_measured_and_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main(["data", "peers", "--repeats", "1", "--gib", "0.01", "--threads", "1", "--directory", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["peers"]
    assert [row["loader"] for row in rows] == ["ours", "torch DataLoader", "h5py alone"] * 2 and rows[0]["ours_over_it"] == 1
    assert [row["sample_mb"] for row in rows] == [16.8] * 3 + [56.6] * 3
    for hpcai_row, *peer_rows in (rows[:3], rows[3:]):
        assert all(peer["ours_over_it"] == pytest.approx(hpcai_row["mb_s"] / peer["mb_s"], rel=0.1, abs=0.01) for peer in peer_rows)
    assert lines[0].startswith("peers: data") and "ours over it" in "".join(lines[1:5]) and list(tmp_path.iterdir()) == []


def test_shared_parts_of_an_app_are_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run_in_process(args: list[str], environ: dict[str, str]) -> Any:
        calls.append(args)
        assert bench.main(args) == 0
        return {"mb": json.loads(capsys.readouterr().out)["mb"] * (0.5 if args[-1] == "ours" else 1.0)}

    monkeypatch.setattr(app, "run_in_subprocess", run_in_process)  # a process takes ten seconds
    result = run_bench(capsys, "cosmoflow", *SMALL, "--repeats", "1", "--precision", "fp32", "auto")
    row = result["steps"][0]
    assert row["case"] == "size 32, filters 2, batch 1" and row["precision"] == "fp32" and result["steps"][1]["precision"] == "auto"
    assert row["plain_over_ours"] == pytest.approx(row["plain_s"] / row["ours_s"], rel=0.05)
    memory = result["memory"][0]
    assert memory["ours_over_plain"] == pytest.approx(memory["ours_mb"] / memory["plain_mb"], abs=0.01)
    assert [args[1] for args in calls] == ["memory"] * 2 and all(args[2:5] == SMALL and args[-2] == "--peak" for args in calls)


def test_a_ratio_above_1_means_that_hpcai_is_faster() -> None:
    assert app.timing_row({"plain": 3.0, "peer": 6.0, "ours": 1.5}) == {
        "plain_s": 3.0, "peer_s": 6.0, "ours_s": 1.5, "plain_over_ours": 2.0, "peer_over_ours": 4.0,
    }  # fmt: skip


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    args = ["model.filters=[2, 4]", "model.window=[16, 16, 16]", "--repeats", "1", "--peers"]
    result = run_bench(capsys, "unet3d", "steps", *args)
    assert "monai (pip install 'hpcai-suite[peers]')" in result["left_out"]["left out"] and "monai_s" not in result["steps"][0]
    assert {"plain_s", "channels_last_s", "ours_s"} <= set(result["steps"][0])


def test_runs_alternate_after_a_warmup() -> None:
    order: list[str] = []
    now = [0.0]

    def run(name: str, seconds: float) -> None:
        now[0] += seconds if order.count(name) >= 2 else 100.0
        order.append(name)

    runs = {"a": lambda: run("a", 1.0), "b": lambda: run("b", 2.0)}
    assert timing.alternate(runs, 1, clock=lambda: now[0]) == {"a": 1.0, "b": 2.0} and order == ["b", "a", "a", "b", "b", "a"]
