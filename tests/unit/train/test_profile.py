"""Profiler traces: they hold the selected steps only, and without such steps nothing is written."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcai import dist
from hpcai.errors import ConfigError
from hpcai.train import profile
from hpcai.train.profile import Profile, span

ALONE = dist.single_process(torch.device("cpu"))


def train(profiler: Profile, first: int, last: int) -> None:
    with profiler:
        for step in range(first, last + 1):
            with span(f"forward of {step}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.after_step(step)


@pytest.mark.parametrize(
    ("steps", "done", "last", "profiled"),
    [((3, 4), 0, 6, [3, 4]), ((2,), 0, 6, [2]), ((1, 2), 0, 6, [1, 2]), ((3, 5), 3, 6, [4, 5]), ((2, 9), 0, 3, [2, 3])],
)
def test_the_trace_holds_the_spans_of_the_chosen_steps_only(
    tmp_path: Path, steps: tuple[int, ...], done: int, last: int, profiled: list[int]
) -> None:
    train(Profile(tmp_path, steps, ALONE, done), done + 1, last)
    events = json.loads(gzip.open(tmp_path / "profile/rank-0000.json.gz").read())["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("ph") == "X"]
    assert [name for name in names if name.startswith("forward ")] == [f"forward of {n}" for n in profiled]
    assert [name for name in names if name.startswith("step ")][: len(profiled)] == [f"step {n}" for n in profiled]
    assert names.count("aten::matmul") == len(profiled)
    assert "aten::mm" in (tmp_path / "profile/rank-0000.txt").read_text()
    assert span("after") is span("that")


def test_nothing_is_written_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second: Any = SimpleNamespace(device=torch.device("cpu"), is_first=False, job=dist.Axis("job", 2, 1))
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler, "profile", lambda **kwargs: pytest.fail("profiled"))
        train(Profile(tmp_path, None, ALONE), 1, 5)
        train(Profile(None, (2, 3), ALONE), 1, 5)
        train(Profile(tmp_path, (2, 3), second), 1, 5)
        train(Profile(tmp_path, (8, 9), ALONE), 1, 5)
        train(Profile(tmp_path, (1, 2), ALONE, done=2), 3, 5)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_end_the_run_and_invalid_steps_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("in the way")
    train(Profile(tmp_path, (2, 3), ALONE), 1, 4)
    assert "cannot be written" in caplog.text
    for invalid in ((), (0, 1), (4, 2), (1, 2, 3)):
        with pytest.raises(ConfigError, match="first and the last"):
            Profile(tmp_path, invalid, ALONE)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_on_a_gpu_spans_are_nvtx_ranges_and_steps_are_marked_for_nsight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(profile, "_gpu", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    profiler = Profile(tmp_path, (2,), ALONE)
    profiler._cuda = True
    train(profiler, 1, 3)
    spans = [[f"forward of {n}", "pop"] for n in (1, 2, 3)]
    assert calls == [*spans[0], "wait", "start", *spans[1], "wait", "stop", *spans[2]]
