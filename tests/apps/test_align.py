"""The app that aligns a model: every method trains, on any number of ranks, and what it leaves is a model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apps.align import picture
from data_prep import alignment
from hpcai import config, log
from hpcai.cli.report import draw_run, read_run, theme
from hpcai.models.llm import LLM, Critic, LLMConfig, Tokenizer
from tests.apps.app_runs import ROOT, App, check_equal_weights, metric_by_step, resumed_from

ALIGN = App(
    "align", lambda folder: None,
    ["data.validation_prompts=6", "data.pairs=easy.jsonl", "data.batch=4", "rollout.prompts=4", "rollout.num_generations=4",
     "rollout.num_mini_batches=2", "rollout.epoch=8", "train.steps=10", "train.report_every=1", "checkpoint.every_steps=1",
     "step.lr=0.1"],
)  # fmt: skip


def count_low(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """Reward characters with low codes, which an untrained model learns in a few steps."""
    return [sum(ord(letter) < 100 for letter in text) / 16 for text in completions]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the task, and ``model``, a folder of Hugging Face with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("align") / "data"
    sizes = ["--prompts", "40", "--validation", "8", "--demonstrations", "8", "--pairs", "24"]
    assert alignment.main(["arithmetic", str(folder), *sizes]) == 0
    pairs = ({"prompt": f"{n}+1=", "chosen": "11", "rejected": "2"} for n in range(24))
    (folder / "easy.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    torch.manual_seed(0)
    for name, kind in ("model", LLM), ("critic", Critic):
        model = kind(LLMConfig(vocabulary=257, width=16, layers=1, heads=2, inner=24, positions=40))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        (folder / name).mkdir()
        model.save(folder / name / "model.safetensors")
        Tokenizer.byte_level().save(folder / name)
    return folder


def overrides(data: Path, *extra: str) -> list[str]:
    return [f"start.weights={data}/model", "reward.function=tests.apps.test_align:count_low", *extra]


def test_every_yaml_loads() -> None:
    for path in sorted((ROOT / "apps/align/configs").glob("*.yaml")):
        assert config.load(ALIGN.settings, path) != ALIGN.settings()


def test_a_run_leaves_a_model_and_a_report(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theme, "DPI", 30)
    run = tmp_path / "run"
    assert ALIGN.run(data, run, *overrides(data, "train.steps=40", "rollout.epoch=40")) == 0
    events = log.read_metrics(run / "metrics.jsonl")
    rollouts = [event for event in events if event["kind"] == "rollout"]
    assert [event["step"] for event in rollouts] == [*range(0, 40, 2)] and rollouts[0]["answers"] == 16
    rewards = metric_by_step(run, "evaluate", "reward")
    assert [*rewards] == [0, 20, 40] and rewards[40] > rewards[0] + 0.2
    train = next(event for event in events if event["kind"] == "train")
    assert {"loss", "reward", "length", "entropy", "kl_k3", "clipped_high"} <= {*train}
    assert run.joinpath("answers.npz").is_file() and len(picture.read(run / "answers.npz").texts) == 6
    page = draw_run(run).read_text()
    assert read_run(run).found is not None and "held-out prompts are solved" in page and "answers at the last evaluation" in page
    model = LLM.load(run)
    assert isinstance(str(model.generate("12+34=", most=3)), str)


def test_the_cell_of_the_page_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cell,) = re.findall(r"```python\n(.*?)```", (ROOT / "apps/align/README.md").read_text(), re.S)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/arithmetic-sft").symlink_to(data / "model")
    monkeypatch.chdir(tmp_path)
    exec(cell, {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_several_ranks_train_as_one(data: Path, tmp_path: Path) -> None:
    exact = overrides(data, "step.precision=fp64")
    single = ALIGN.cached_run(data, *exact)
    for number, axes in enumerate((["mesh.tensor=2"], ["step.shard=weights", "rollout.staleness=0"])):
        ALIGN.on_ranks(2, data, run := tmp_path / f"run{number}", *exact, *axes)
        for kind, name in (("train", "loss"), ("train", "reward"), ("evaluate", "reward")):
            assert metric_by_step(run, kind, name) == pytest.approx(metric_by_step(single, kind, name), rel=1e-6), name
        check_equal_weights(single, run, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [["method=grpo"], ["method=ppo", "rollout.kl.target=0.1"]], ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(method: list[str], data: Path, tmp_path: Path) -> None:
    settings = overrides(data, *method, "rollout.staleness=1", "train.steps=6")
    assert ALIGN.run(data, tmp_path / "run", *settings, "train.steps=3") == 0
    assert ALIGN.run(data, tmp_path / "run", *settings) == 0 and resumed_from(tmp_path / "run") == 3
    check_equal_weights(ALIGN.cached_run(data, *settings), tmp_path / "run")


def test_a_reward_model_is_trained_and_rewards(data: Path, tmp_path: Path) -> None:
    pairs = ["data.validation_pairs=easy.jsonl", "data.validation=null"]
    assert ALIGN.run(data, tmp_path / "reward", "method=reward", *overrides(data, *pairs), "train.metric=accuracy") == 0
    losses, accuracy = (metric_by_step(tmp_path / "reward", "evaluate", name) for name in ("loss", "accuracy"))
    assert losses[10] < losses[0] and accuracy[10] == 1
    model = overrides(data, f"reward.model={tmp_path}/reward", "reward.function=null", "data.validation=null", "train.metric=null")
    assert ALIGN.run(data, tmp_path / "run", "method=rloo", *model, "train.steps=2") == 0
    assert not (tmp_path / "run/answers.npz").exists()


@pytest.mark.parametrize("method", ["dpo", "ipo"])
def test_preferences_raise_the_chosen_answers(method: str, data: Path, tmp_path: Path) -> None:
    assert ALIGN.run(data, tmp_path / "run", f"method={method}", *overrides(data, "train.steps=10")) == 0
    accuracy = metric_by_step(tmp_path / "run", "train", "accuracy")
    assert accuracy[10] == 1 and {0, 10} <= {*metric_by_step(tmp_path / "run", "evaluate", "solved")}


@pytest.mark.parametrize(
    ("content", "settings", "text"),
    [
        ('{"question": "1+1="}\n', [], 'line 1: has question, expected a line such as {"prompt": "37+85=", "answer": "122"}'),
        ('{"prompt": 3}\n', [], "line 1: has prompt, expected"),
        ("\n", [], "has no line, expected"),
        (4 * (json.dumps({"prompt": "1" * 50}) + "\n"), [], "line 1 has 51 tokens, the model 40 positions"),
        ("", ["reward.function=nowhere:f"], "reward.function nowhere:f: cannot be imported"),
        ("", ["reward.function=null"], "reward has neither function nor program nor model"),
        ("", ["data.prompts=none.jsonl"], "none.jsonl: no such file; make it with"),
        ("", ["model.inner=32"], "model.inner is 32, in"),
        ("", ["mesh.evaluate=1"], "set mesh.evaluate to 0"),
    ],
)  # fmt: skip
def test_bad_input_is_reported_in_one_line(
    content: str, settings: list[str], text: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra: list[Any] = overrides(data)
    if content:
        (tmp_path / "prompts.jsonl").write_text(content)
        extra.append(f"data.prompts={tmp_path}/prompts.jsonl")
    ALIGN.check_refused(data, tmp_path / "run", [*extra, *settings], text, capsys)
