"""`hpcai bench`: names, parts, one JSON object, and a part that fails does not take the others with it."""

import json
from typing import Any

import pytest
import torch

from hpcai.cli import apps, bench
from hpcai.cli.bench import app, timing
from hpcai.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["model.size=32", "model.filters=2", "data.batch=1"]


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert bench.main([*words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_all_goes_on_after_one_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "SHARED", ("step", "data"))
    monkeypatch.setattr(bench.apps, "names", lambda part: [])
    monkeypatch.setattr(bench, "_BRIEFLY", {"step": ["nothing"], "data": ["--help"]})
    ran = []

    def run(command: list[str], **words: Any) -> Any:
        ran.append(command[-1])
        bad = "nothing" in command[-1]
        return type("Done", (), {"returncode": 2 * bad, "stdout": "" if bad else '{"data": 1}', "stderr": "no part 'nothing'"})

    monkeypatch.setattr(timing.subprocess, "run", run)
    assert bench.main(["all", "--json"]) == 1 and len(ran) == 2
    assert json.loads(capsys.readouterr().out) == {"step": {"failed": "no part 'nothing'"}, "data": {"data": 1}}


def test_names_are_those_of_apps_and_of_what_they_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    shown = capsys.readouterr().out
    names = apps.names("trial")
    assert f"step, data, gpu, growth, {', '.join(names)}, all" in shown and {"cosmoflow", "llm"} < {*names}
    assert bench.main(["chess"]) == 2 and "there is no 'chess'; expected one of step" in capsys.readouterr().err


@pytest.mark.parametrize("name, known", [("step", "optimizer, capture"), ("cosmoflow", "steps, memory"), ("openfold", "featurize")])
def test_an_unknown_part_is_refused(name: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([name, "capturing"])
    shown = capsys.readouterr().err
    assert "there is no part 'capturing'" in shown and known in shown


def test_parts_of_a_step_are_told_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["step", "optimizer", "--repeats", "1", "--millions", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = json.loads(lines[-1])["optimizer"][0]
    assert row["torch_ms"] > 0 and row["ours_ms"] > 0 and lines[0].startswith("optimizer: step") and "ratio" in "".join(lines[1:5])


def test_every_shared_part_of_an_app(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def here(words: list[str], environ: dict[str, str]) -> Any:
        asked.append(words)
        assert bench.main(words) == 0
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(app, "apart", here)  # without processes, which take ten seconds each
    parts = ["steps", "memory", "build", "loop", "precision", "wall", "profile"]
    found = measured(capsys, "cosmoflow", *parts, *SMALL, "--repeats", "1", "--precision", "fp32", "auto")
    row = found["steps"][0]
    assert row["case"] == "size 32, filters 2, batch 1" and row["precision"] == "fp32" and found["steps"][1]["precision"] == "auto"
    assert row["plain_over_ours"] == pytest.approx(row["plain_s"] / row["ours_s"], rel=0.05)
    memory = found["memory"][0]
    assert memory["ours_over_plain"] == pytest.approx(memory["ours_mb"] / memory["plain_mb"], abs=0.01)
    assert found["build"][0]["parameters"] > 1000 and set(found["build"][0]) >= {"plain_s", "ours_s"}
    assert found["loop"][0]["fit_cpu_s"] >= found["loop"][0]["inside_cpu_s"] > 0
    assert found["precision"][0]["bf16_params_ms"] > 0 and found["wall"][0]["kept_s"] > 0 and found["wall"][0]["threads"] == 1
    assert found["profile"][0]["products and convolutions"].endswith("%")
    assert [words[1] for words in asked] == ["memory"] * 2 + ["build"] * 2 + ["wall"] * 3
    assert all(words[2:5] == SMALL and words[-2] == "--one" for words in asked)


def test_a_ratio_above_1_is_in_our_favour() -> None:
    assert app.timed({"plain": 3.0, "peer": 6.0, "ours": 1.5}, False) == {
        "plain_s": 3.0, "peer_s": 6.0, "ours_s": 1.5, "plain_over_ours": 2.0, "peer_over_ours": 4.0,
    }  # fmt: skip
    on_gpu = app.timed({"plain": 0.03, "captured": 0.01, "ours": 0.02}, True)
    assert on_gpu["plain_ms"] == 30 and on_gpu["plain_over_ours"] == 3.0, "against the best of ours"
    assert app.timed({"plain": "out of memory", "ours": 0.02}, True) == {"plain_ms": "out of memory", "ours_ms": 20.0}


def test_what_a_gpu_cannot_do_is_said_in_its_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    problems: dict[str, Exception] = {
        "plain": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        "captured": ConfigError("step.capture is whole, but no"),
    }
    form = app.Bench.form

    def fails(self: app.Bench, name: str, case: Any, precision: str = "fp32") -> Any:
        if name in problems:
            raise problems[name]
        return form(self, "ours", case)

    monkeypatch.setattr(app.Bench, "form", fails)
    monkeypatch.setattr(app.Bench, "on_gpu", True, raising=False)
    made = app.Bench.__init__
    monkeypatch.setattr(app.Bench, "__init__", lambda self, *given: (made(self, *given), setattr(self, "on_gpu", True))[0])
    row = measured(capsys, "cosmoflow", "steps", *SMALL, "--repeats", "1")["steps"][0]
    assert row["plain_ms"] == "out of memory" and row["captured_ms"] == "step.capture is whole, but no" and row["ours_ms"] > 0
    problems["ours"] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        measured(capsys, "cosmoflow", "steps", *SMALL)


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    words = ["model.filters=[2, 4]", "model.window=[16, 16, 16]", "--repeats", "1", "--peers"]
    found = measured(capsys, "unet3d", "steps", *words)
    assert "monai (pip install 'hpcai-suite[peers]')" in found["left_out"]["left out"] and "monai_s" not in found["steps"][0]
    assert {"plain_s", "channels_last_s", "ours_s"} <= set(found["steps"][0])


def test_runs_take_turns_and_the_first_ones_do_not_count() -> None:
    seen: list[str] = []
    spent = timing.alternate({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 2)
    assert seen == ["b", "a", "a", "b"] * 2 and set(spent) == {"a", "b"}
