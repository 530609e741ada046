"""`hpcai bench`: parts by name, one JSON object, and a part that fails does not take the others with it."""

import json

import pytest

from hpcai.cli import bench, bench_step


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


def test_gaps_are_the_time_in_which_no_kernel_ran() -> None:
    class Event:
        def __init__(self, first: float, last: float, kind: str = "CUDA") -> None:
            self.time_range = type("Range", (), {"start": first, "end": last})
            self.device_type = type("Kind", (), {"name": kind})

    class Trace:
        def events(self) -> list[Event]:
            return [Event(0, 4), Event(2, 5), Event(0, 100, "CPU"), Event(6, 8), Event(7, 10)]

    assert bench_step._gaps(Trace()) == pytest.approx(0.1)
