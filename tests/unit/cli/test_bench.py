"""`hpcai bench`: parts by name, one JSON object, and a part that fails does not take the others with it."""

import json

import pytest
import torch

from hpcai.cli import bench, bench_step, bench_unet3d


def test_all_goes_on_after_one_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "ALL", {"bad": ["step", "nothing"], "good": ["step", "capture", "--repeats", "1"]})
    assert bench.main(["all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "there is no part 'nothing'" in found["bad"]["failed"] and "capture" in found["good"]


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["step", "capturing"])
    assert "there is no part 'capturing'; expected some of optimizer, precision, capture" in capsys.readouterr().err


def test_a_part_prints_its_rows_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["step", "optimizer", "--repeats", "1", "--millions", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = json.loads(lines[-1])["optimizer"][0]
    assert row["torch_ms"] > 0 and row["ours_ms"] > 0 and lines[0] == "optimizer" and "ratio" in lines[1]


def test_the_3d_unet_is_measured_against_the_plain_network_in_both_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "64", "--divide", "16", "--repeats", "1", "--precision", "fp32"]
    assert bench.main(["unet3d", "steps", "profile", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    row, unit = found["steps"][0], "ms" if torch.cuda.is_available() else "s"
    better = min(row[f"contiguous_{unit}"], row[f"channels_last_{unit}"])
    assert row["ratio"] == pytest.approx(better / row[f"ours_{unit}"], rel=0.05) and found["profile"][0]["convolution"].endswith(
        "%"
    )
    assert lines[0].startswith("steps: unet3d") and "channels last" in lines[2]
    with pytest.raises(SystemExit):
        bench.main(["unet3d", "layers"])
    assert "there is no part 'layers'; there are steps, memory, profile" in capsys.readouterr().err


def test_the_plain_3d_unet_is_the_same_network() -> None:
    runs = {kind: bench_unet3d._setup(kind, 64, "fp32", 16) for kind in ("contiguous", "channels_last", "ours")}
    losses = {kind: float(run()) for kind, run in runs.items()}
    assert losses["contiguous"] == pytest.approx(losses["channels_last"], rel=1e-5) == pytest.approx(losses["ours"], rel=1e-5)


def test_gaps_are_the_time_in_which_no_kernel_ran() -> None:
    class Event:
        def __init__(self, first: float, last: float, kind: str = "CUDA") -> None:
            self.time_range = type("Range", (), {"start": first, "end": last})
            self.device_type = type("Kind", (), {"name": kind})

    class Trace:
        def events(self) -> list[Event]:
            return [Event(0, 4), Event(2, 5), Event(0, 100, "CPU"), Event(6, 8), Event(7, 10)]

    assert bench_step._gaps(Trace()) == pytest.approx(0.1)
