"""Acceptance of a system: sites as ReFrame's configuration, references, and the judgement of runs and parts."""

import json
import re
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hpcai import cli, config
from hpcai.cli import accept, apps
from hpcai.cli.accept import parts, runs, system
from hpcai.cli.script import list_sites
from hpcai.errors import ConfigError, DataError, MissingExtraError

EXPECTED = runs.read_declaration("cosmoflow")["small"]["expected"]
NEEDED = {"account": "project", "queue": "somewhere"}


def options(site: str, **changes: Any) -> Namespace:
    values = {"site": site, "option": [], "container": None, "per_node": None, "nodes": 4, "jobs": 8, "pending": "2h", "list": True}
    return Namespace(**values | NEEDED | changes)


@pytest.mark.parametrize("site", [*list_sites(), "local"])
def test_a_site_is_a_configuration_of_reframe(site: str, tmp_path: Path) -> None:
    config = system.describe_system(options(site), tmp_path)
    [entry] = config["systems"]
    [partition] = entry["partitions"]
    per_node, lines = partition["extras"]["per_node"], "\n".join(partition["prepare_cmds"])
    assert entry["name"] == {"generic": "slurm"}.get(site, site)
    assert {"scale_1_node", "scale_2_nodes", "scale_4_nodes"} < set(partition["features"])
    assert ("scale_1_4_node" in partition["features"]) == (per_node % 4 == 0) and "scale_8_nodes" not in partition["features"]
    assert not any(re.match("--(ntasks-per-node|cpus-per-task)", option) for option in partition["access"]), "ReFrame writes them"
    assert ("gpu" in partition["features"]) == (site not in ("generic", "pbs", "local")) and "srun=() mpiexec=()" in lines
    reframe = pytest.importorskip("reframe.core.config", reason="ReFrame is not installed: configurations are NOT validated")
    (tmp_path / "settings.json").write_text(json.dumps(config))
    loaded = reframe.load_config(str(tmp_path / "settings.json"))
    loaded.validate()


def test_what_a_site_requires_is_told_before_a_job() -> None:
    with pytest.raises(ConfigError, match=r"polaris takes no job without --account; give a project's name\n.*--queue"):
        system.describe_system(options("polaris", account=None, queue=None), Path())
    with pytest.raises(ConfigError, match="no flags for containers; add them to a copy"):
        system.describe_system(options("jupiter", container="image.sif"), Path())
    with pytest.raises(ConfigError, match="(qsub|sbatch) is not installed here; call this on a login node of polaris"):
        system.describe_system(options("polaris", list=False), Path())


def test_another_version_of_reframe_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "3.12.1")
    assert cli.main(["accept", "--site", "local"]) == 2
    assert "ReFrame is 3.12.1, expected 4.8 or later, below 5.0: pip install" in capsys.readouterr().err

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingExtraError, match="acceptance"):
        accept.check_reframe()


def test_references_are_read_and_written_by_system(tmp_path: Path) -> None:
    file = tmp_path / "references.yaml"
    figures: system.Figures = {"HPCAI_ranks %scale=1_node": {"all_reduce": (1.5, -0.1, None), "job_end": (2.0, None, 0.2)}}
    assert system.read_references(file, "mine") == {}
    system.write_references(file, "other", {"HPCAI_x": {"throughput": (1.0, None, None)}})
    system.write_references(file, "mine", figures)
    system.write_references(file, "mine", {"HPCAI_bert": {"energy": (3.0, None, 0.1)}})
    assert system.read_references(file, "mine") == figures | {"HPCAI_bert": {"energy": (3.0, None, 0.1)}}
    assert set(system.read_references(file, "other")) == {"HPCAI_x"} and file.read_text().startswith("# Figures of systems by test")
    assert system.references_file("./mine.sh") == Path("references.yaml")
    assert system.references_file("alps").parent.name == "sites"


@pytest.mark.parametrize("text", ["m: {x: {y: [1, 2]}}", "m: {x: {y: [a, -1, 1]}}", "m: [", "m: {x: {y: [1, -3, null]}}"])
def test_damaged_references_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "references.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"references.yaml: [\s\S]*; expected SYSTEM: {TEST: {FIGURE: \[value, lower, upper\]}}"):
        system.read_references(tmp_path / "references.yaml", "mine")


def test_runs_of_an_app_have_the_batch_of_their_scale() -> None:
    small, gpus = runs.plan_run("cosmoflow", "small", 4, 4, True), runs.plan_run("cosmoflow", "weak", 16, 4, True)
    assert small is not None and gpus is not None
    assert small.run[:3] == ["run", "cosmoflow", "small.yaml"] and small.run[-1] == "report.directory=run"
    of_rank = runs.read_declaration("cosmoflow")["scaling"]["batch"]
    assert f"data.batch={16 * of_rank}" in gpus.run and "data.directory=data" in gpus.run
    strong = [runs.plan_run("cosmoflow", "strong", ranks, 4, True) for ranks in (4, 8, 16)]
    assert all(run is not None and f"data.batch={16 * of_rank}" in run.run for run in strong)
    assert runs.plan_run("cosmoflow", "strong", 64 * of_rank, 4, True) is None, "more ranks than samples"
    on_cpus = runs.plan_run("cosmoflow", "weak", 2, 2, False)
    assert on_cpus is not None and on_cpus.run[2] == "small.yaml" and "data.batch=4" in on_cpus.run
    names = [name for app in runs.declared_apps() for name in runs.read_declaration(app)]
    assert names.count("checkpoint") == names.count("resume") == 1, "each part is declared by one app"
    large = runs.plan_run(runs.app_of("checkpoint"), "small", 4, 4, True, "checkpoint")
    assert large is not None and "width: 2048" in large.run[-2] and "data.batch=4" in large.run


@pytest.mark.parametrize("app", runs.declared_apps())
def test_scaling_on_cpus_has_settings_that_the_app_takes(app: str) -> None:
    for mode, ranks in (("weak", 1), ("weak", 2), ("strong", 1), ("strong", 2)):
        planned = runs.plan_run(app, mode, ranks, 2, False)  # type: ignore[arg-type]
        assert planned is not None
        settings = apps.require_module(app, "settings").Config
        loaded = config.load(settings, apps.app_folder(app) / "configs" / planned.run[2], planned.run[3:])
        assert loaded.data.batch % ranks == 0 and loaded.report.directory == Path("run")


def write_events(run: Path, *events: dict[str, Any]) -> Path:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps({"time": 0.0, **event}) + "\n" for event in events))
    return run


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    expected = EXPECTED
    fields: dict[str, dict[str, float]] = {}
    for name, (value, _) in expected.items():
        fields.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = value
    events = ({"kind": kind, **value} for kind, value in fields.items())
    run = write_events(tmp_path / "run", {"kind": "train", "loss": 9.0}, *events)
    assert runs.find_mistake("cosmoflow", run) == ""
    fields["train"]["loss"] *= 1 + 1.5 * expected["train.loss"][1]
    write_events(run, *({"kind": kind, **value} for kind, value in fields.items() if kind != "evaluate"))
    text = runs.find_mistake("cosmoflow", run)
    assert re.match(r"train\.loss is [\d.]+, expected [\d.]+ within 2 %; evaluate\.mae is missing, expected", text), text


def test_figures_are_medians_after_the_first_report(tmp_path: Path) -> None:
    parts_of_step, loss = {"data": 0.1, "forward": 0.2, "backward": 0.2, "evaluate": 9.0}, 1.01 * EXPECTED["train.loss"][0]
    rates = (1.0, 8.0, 10.0, 12.0)
    train = [{"kind": "train", "samples_per_second": rate, "parts": parts_of_step, "loss": loss} for rate in rates]
    stop = {"kind": "stop", "seconds": 30.0, "target_reached": True}
    energy = {"kind": "energy", "joules": 60.0, "samples": 20}
    run = write_events(tmp_path / "run", *train, energy, stop)
    expected = {"throughput": 10.0, "deviation": None, "loader_share": pytest.approx(20.0), "energy": 3.0, "time_to_target": 30.0}
    assert runs.read_figures("cosmoflow", "target", run) == expected
    small = runs.read_figures("cosmoflow", "small", run)
    assert small["time_to_target"] is None and small["deviation"] == pytest.approx(1.0)


def write_doctor(path: Path, rates: list[float], shares: list[float]) -> Path:
    members = [{"node": f"n{rank // 2}"} for rank in range(len(rates))]
    paces = {str(rank): {"rate": rate, "share": share} for rank, (rate, share) in enumerate(zip(rates, shares))}
    network = {"paces": paces, "links": [{"latency": 2e-6, "rate": 4e9}], "sums": {"8": 1.0, "1000000000": 0.5},
               "all_to_all": {"1000000000": 0.25}}  # fmt: skip
    folders = {"0": {"write": 2e9, "read": 0.0}, "1": {"write": 1e9, "read": 3e9}}
    errors = [{"severity": "warning", "place": "a", "text": "b"}]
    path.write_text(json.dumps({"members": members, "network": network, "storage": {"run": folders}, "findings": errors}))
    return path


def test_a_slow_rank_is_named_with_its_node(tmp_path: Path) -> None:
    even = write_doctor(tmp_path / "even.json", [9e9, 1e10, 1e10, 9.5e9], [1.0] * 4)
    assert parts.find_slow_rank(even) == "" and parts.describe_errors(even) == ""
    for rates, shares in (([1e10, 1e10, 1e10, 4e9], [1.0] * 4), ([1e10] * 4, [1.0, 1.0, 1.0, 0.4])):
        text = parts.find_slow_rank(write_doctor(tmp_path / "slow.json", rates, shares))
        assert text.startswith("rank 3 on node n1 computes 4.0 GFLOP/s, 40 % of rank 0 on node n0, and has")
    loaded = write_doctor(tmp_path / "loaded.json", [1e10] * 4, [0.5, 0.5, 0.5, 0.2])
    assert parts.find_slow_rank(loaded) == "", "other programs have part of all cores"
    assert parts.read_rates(even) == pytest.approx({
        "all_reduce": 3.0, "all_to_all": 3.0, "link_latency": 2.0, "link_rate": 4.0, "slowest_rank": 90.0, "disk_write": 1.0,
        "disk_read": 3.0,
    })  # fmt: skip


def test_the_end_of_a_job_after_a_kill(tmp_path: Path) -> None:
    assert "no rank was killed" in parts.job_end(tmp_path)[1]
    (tmp_path / "killed.txt").write_text("3 n1 1000.0")
    for code, end, text in (("1", 1002.5, ""), ("0", 1002.5, "exit code 0"), ("1", 1100.0, "after 100 s, expected 60 or less")):
        (tmp_path / "killed_code").write_text(f"{code} {end}")
        seconds, problem = parts.job_end(tmp_path)
        assert seconds == end - 1000 and text in problem and ("rank 3 on node n1" in problem) == bool(text)


def test_tensors_that_differ_after_a_resume_are_named(tmp_path: Path) -> None:
    for run, change in (("run", 0.0), ("same", 0.0), ("other", 1e-7)):
        for step in ("step-00000008", "step-00000016"):
            folder = tmp_path / run / "checkpoints" / step
            folder.mkdir(parents=True)
            tensors = {"weight": np.ones(4, np.float32) + np.float32(change), "step": np.array([16])}
            save_file(tensors, folder / "tensors-000.safetensors")
    assert parts.find_difference(tmp_path / "run", tmp_path / "same") == ""
    assert parts.find_difference(tmp_path / "run", tmp_path / "other").startswith("step-00000016 tensors-000 weight and 1 tensors")
    assert "have other last checkpoints" in parts.find_difference(tmp_path / "run", tmp_path / "none")


def test_a_job_that_failed_says_why(tmp_path: Path) -> None:
    errors, output = tmp_path / "job.err", tmp_path / "job.out"
    errors.write_text("Lmod has detected the following error: The following module(s) are unknown: \"rocm/7\"\n\nlast line\n")
    assert runs.describe_failure(None, errors, output) == runs.NEVER_STARTED
    output.write_text("")
    text = runs.describe_failure(None, errors, output)
    assert text.startswith("the job ended before its run, in its data or the lines of the site file: Lmod has") and "rocm/7" in text
    output.write_text("started\nhpcai run: triton: Failed to find C compiler. Please specify via CC\n")
    errors.write_text("")
    assert "exit code 1: hpcai run: triton: Failed to find C compiler" in runs.describe_failure("1", errors, output)
    assert "it printed nothing" in runs.describe_failure("9", errors, tmp_path / "none")


def test_results_of_a_session_that_was_cut_off_are_read(tmp_path: Path) -> None:
    kept = tmp_path / "passed.jsonl"
    assert runs.read_kept(kept) == []
    kept.write_text('{"display_name": "a"}\n{"display_na')
    assert runs.read_kept(kept) == [{"display_name": "a"}]
    kept.write_text('{"display_na\n{"display_name": "a"}\n')
    with pytest.raises(DataError, match=r"passed.jsonl:1: '{\"display_na' is no result; remove the line"):
        runs.read_kept(kept)
