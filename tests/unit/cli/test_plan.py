"""`hpcai plan`: plans of training runs."""

import json
from dataclasses import replace
from typing import Any

import pytest

import apps.llm.benchmarks as llm
from apps.openfold.benchmarks import Benchmark
from hpcai.cli import apps, main
from hpcai.cli.plan import print_tables
from hpcai.cli.plan.planner import InfeasibleError, Planner, _scale_events
from hpcai.cli.plan.training import Evaluation, find_training
from hpcai.errors import ConfigError
from hpcai.plan.machines import find_machine as machine
from tests.reference_data import load_json

TINY = [*Benchmark().tiny, "model.template=null", "features.templates=0", "features.recycles=0"]
EXPERTS = "{count: 4, top_k: 2, inner: 64, dense_layers: [0]}"
PLANNED = ["bert", "cosmoflow", "deepcam", "dlrm", "llm", "openfold", "resnet", "retinanet", "rgat", "unet3d"]


def run_plan(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main(["plan", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny() -> Planner:
    return Planner("openfold", TINY)


def test_all_apps_but_those_without_a_plan_are_planned() -> None:
    assert apps.with_part("plan") == PLANNED
    for name in PLANNED:
        training = find_training(name)
        assert training.published[0].kind == "step" and any(point.kind == "run" for point in training.published)
        assert all(training.samples_needed(point.batch) > 0 for point in training.published)


@pytest.mark.slow
def test_a_sharded_step_takes_less_time_and_memory(tiny: Planner) -> None:
    h100 = machine("h100")
    (full, peak), (sharded, sharded_peak) = (tiny.fit_memory(ways, 128, 1, h100)[:2] for ways in (1, 2))
    assert full.compute_bound + full.memory_bound > 1.2 * (sharded.compute_bound + sharded.memory_bound) and peak > sharded_peak
    assert sharded.messages > full.messages and sharded.exposed_communication > full.exposed_communication


def test_a_job_is_its_steps_its_loader_and_its_last_evaluation(tiny: Planner) -> None:
    job, evaluation = tiny.plan_job(256, 1, 256, machine("h100"), evaluating=32), tiny.training.evaluation
    alone = job.fit.step.seconds - job.fit.step.exposed_communication  # a sample on one GPU
    score = evaluation.samples * evaluation.cost * alone / 32
    train = 520 * job.seconds
    assert job.steps == pytest.approx(520) and job.loader > 0
    assert job.minutes == pytest.approx((max(train, 520 / 40 * score) + score) / 60)
    assert job.evaluation == pytest.approx(job.minutes - train / 60)
    inline = tiny.plan_job(256, 1, 256, machine("h100"))  # thirteen evaluations, each on all GPUs
    assert inline.minutes == pytest.approx((train + 520 / 40 * score * 32 / 256) / 60)
    assert [Evaluation(1, 1.0, **when).count(100.0, 4) for when in ({"every": 20.0, "start": 40.0}, {"steps": 10})] == [3.0, 2.5]


def test_more_replicas_than_recorded_change_only_the_gradients(tiny: Planner) -> None:
    small, large = (tiny.fit_memory(2, replicas, 1, machine("h100")).step for replicas in (32, 1024))
    assert (small.messages, small.memory_bound, small.launches) == (large.messages, large.memory_bound, large.launches)
    assert large.sent > small.sent and large.seconds > small.seconds


def test_an_update_reads_and_writes_its_moments() -> None:
    """Four bytes a parameter: weights, their average and moments twice, the gradient twice; Adam has two moments, SGD one."""
    planner = Planner("llm", [*llm.Benchmark().tiny, "lora=null", "step.ema_decay=0.9"])
    records = [planner.record_steps(1, 1, 1, (f"step.optimizer={name}",))[0][1].record for name in ("adamw", "sgd")]
    adam, sgd = (sum(event.bytes for event in record.events if getattr(event, "name", "") == "update") for record in records)
    assert adam * (2 + 2 + 2 + 2) == sgd * (2 + 2 + 4 + 2) > 0


def test_slowdown_is_fitted_to_a_step(tiny: Planner) -> None:
    h100 = machine("h100")
    seconds = tiny.fit_memory(1, 1, 1, machine("h100", slowdown=5.0)).step.seconds
    assert tiny.slowdown_of_step(seconds, h100) == pytest.approx(5, rel=5e-3)


def test_memory_savings_are_used_if_needed(tiny: Planner) -> None:
    h100 = machine("h100")
    default, saved = (tiny.mean_step(1, 1, 1, h100, lean).peak for lean in tiny.training.memory_savings)
    assert saved < default
    small = machine("h100", capacity=(saved + default) / 2 / 0.92)
    assert tiny.fit_memory(1, 1, 1, small).memory_savings == ("model.checkpoint=true",)
    with pytest.raises(ConfigError, match=r"exceed the .* GB of h100; split samples further"):
        tiny.fit_memory(1, 1, 1, machine("h100", capacity=saved / 2))


def test_the_command_prints_table_and_json(
    tiny: Planner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpcai.cli.plan.planner.Planner", lambda *args: tiny)
    plan = run_plan(capsys, "openfold", "--gpus", "256", "512", "1026", "--ways", "1", "2", "--slower", "2")
    rows = [row for table in plan["jobs"].values() for row in table]
    assert [(row["gpus"], row["ways"]) for row in rows] == [(256, 1), (256, 2), (512, 2)]  # no batch of 512 is known
    parts = ("kernels_s", "launches_s", "messages_s", "loader_s")
    assert all(row["step_s"] == pytest.approx(sum(row[part] for part in parts)) and row["minutes"] > 0 for row in rows)
    assert plan["slower"] == 2
    print_tables(plan)
    stdout = capsys.readouterr().out
    assert "no batch that is known to reach the target" in stdout and "exposed communication" in stdout


@pytest.mark.parametrize(
    ("ways", "override"),
    [(1, "lora=null"), pytest.param(2, "model.recompute=layers", marks=pytest.mark.claim), (1, f"model.experts={EXPERTS}")],
    ids=["full", "sharded", "experts"],
)
def test_a_deep_model_is_planned_from_few_layers_as_from_all(ways: int, override: str) -> None:
    # With tiny buckets each parameter is reduced alone, so the number of collectives grows with the layers.
    overrides = [*llm.Benchmark().tiny, "model.layers=8", "data.batch=8", "step.bucket_mb=1e-6", "data.documents=joined"]
    reduced, full = Planner("llm", overrides), Planner("llm", overrides)
    full.training.depth = None
    plans = (planner.mean_step(ways, 4, 1, machine("h100"), (override, "step.accumulate=1")) for planner in (reduced, full))
    (step, peak, *_), (full_step, full_peak, *_) = plans
    error = 5e-3 if "experts" in override else 1e-9  # a model of dense layers has no metrics of routers
    for part in ("compute_bound", "memory_bound", "launches", "sent", "messages"):
        assert getattr(step, part) == pytest.approx(getattr(full_step, part), rel=error)
    assert full_step.memory_bound > 0 and full_step.messages > 30
    assert peak == pytest.approx(full_peak, rel=error) and step.seconds == pytest.approx(full_step.seconds, rel=1e-2)
    assert any("model.layers=4" in key[3] for key in reduced._recorded) and len(full._recorded) == 1


def test_a_recording_scales_to_more_replicas() -> None:
    planner = Planner("llm", [*llm.Benchmark().tiny, "lora=null", "step.bucket_mb=0.1"])
    few, more = (planner.record_steps(1, n, 1, (), micro_batches=2)[0][1].record.events for n in (8, 32))
    assert few != more == _scale_events(few, 1, 8, 32)


def test_expert_parallelism_is_recorded_with_all_replicas() -> None:
    planner = Planner("llm", [*llm.Benchmark().tiny, "lora=null", f"model.experts={EXPERTS}", "mesh.expert=4", "data.batch=16"])
    job, h100 = planner.plan_job(16, 1, 16, machine("h100")), machine("h100")
    sent = planner.sent_gb(job, h100)
    assert dict(job.mesh) == {"expert": 4, "replicate": 16} and sum(sent.values()) == pytest.approx(job.fit.step.sent / 1e9)
    rows, width, mixtures, ranks = 128 * 2, 64, 1, 4
    assert sent["expert"] == pytest.approx(3 / 4 * mixtures * (4 * 2 * rows * width + 8 * ranks) / 1e9)
    with pytest.raises(InfeasibleError, match="2 replicas do not divide into groups of 4"):
        planner.plan_job(2, 1, 16, h100)


@pytest.mark.slow
def test_a_search_finds_the_fastest_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*llm.Benchmark().tiny, "lora=null", f"model.experts={EXPERTS}", "data.batch=8"]
    planner, h100 = Planner("llm", settings), machine("h100", gpus_per_node=2)
    every = {}
    for sizes in planner.training.meshes(planner.settings(), 2, h100):
        overrides = tuple(f"mesh.{axis}={size}" for axis, size in sizes.items())
        every[overrides] = planner.plan_job(2, sizes["tensor"], 8, h100, overrides=overrides).minutes
    assert len(every) == 5  # one axis at a time, or none
    jobs = planner.search_meshes(2, h100, count=2)
    assert jobs[0].minutes == every[tuple(jobs[0].overrides)] == min(every.values()) and jobs[1].minutes > jobs[0].minutes
    with pytest.raises(InfeasibleError, match=r"no mesh of 2 GPUs fits the memory of h100 with a batch of 8"):
        planner.search_meshes(2, replace(h100, capacity=1.0))
    plan = run_plan(capsys, "llm", *settings, "--gpus", "2", "--search", "--slower", "1")
    print_tables(plan)
    assert "over each axis" in capsys.readouterr().out and plan["jobs"]["2"][0]["mesh"] == dict(jobs[0].mesh)
    assert main(["plan", "cosmoflow", "--gpus", "2", "--search", "--slower", "1"]) == 2
    assert "this app has no meshes to search" in capsys.readouterr().err


def test_a_model_too_large_for_one_gpu_is_evaluated_by_all() -> None:
    planner, h100 = Planner("llm", [*llm.Benchmark().tiny, "data.batch=8"]), machine("h100")
    sharded = planner.fit_memory(2, 4, 2, h100)
    alone = planner.fit_memory(1, 1, 1, h100).step.seconds
    assert planner._single_gpu_seconds(8, 8, sharded, h100, ()) == pytest.approx(alone, rel=1e-2)
    assert planner._single_gpu_seconds(8, 16, sharded, replace(h100, capacity=1.0), ()) == sharded.step.seconds / 2


@pytest.mark.parametrize("name", ["cosmoflow", pytest.param("unet3d", marks=pytest.mark.claim)])
def test_published_runs_are_predicted_with_errors(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_plan(capsys, name, "--check")["check"]
    assert rows[0]["error_percent"] is None and rows[0]["planned"] == pytest.approx(rows[0]["published"], rel=2e-3)
    errors = [row["error_percent"] for row in rows[1:]]
    print(name, [round(error) for error in errors])
    assert all(row["error_percent"] == pytest.approx(100 * (row["planned"] / row["published"] - 1)) for row in rows[1:])
    assert all(row["at_best"] <= row["planned"] for row in rows) and max(map(abs, errors)) < 40


def test_infeasible_plans_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for args, text in load_json("refused/plans"):
        assert main(["plan", *args, "--gpus", "128", "--slower", "1"]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "openfold", "--gpus", "0"])
    with pytest.raises(ConfigError, match=r"a batch of 64 is not among 128 to 256, the known ones .*reference convergence"):
        find_training("openfold").samples_needed(64)
