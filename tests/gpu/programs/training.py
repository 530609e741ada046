"""A short training on the GPU, compared with two on the CPU: the same seed and another one.  training.py NAME FOLDER [--tiny]

A line of JSON after each run has the rows so far. ``late_loss`` is the mean loss of the last quarter of the steps, ``apart`` its
relative difference from the CPU's; that of the other seed is the noise. The exit code is 1 if a run does not learn, or if the GPU
differs by more than three times the noise and 5 %. HPCAI_TEST_DEVICE=cpu runs all on the CPU.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Training:
    data: tuple[str, ...]
    """the module that prepares the data, its subcommand, and its arguments after the folder"""
    args: tuple[str, ...]
    """the app, its settings file, and overrides"""
    variants: tuple[tuple[str, ...], ...] = ((),)
    """the overrides of each run on the GPU"""
    compared: bool = True
    """whether it also runs on the CPU"""
    tiny: tuple[str, ...] = ()


TRAININGS = {
    "cosmoflow-small": Training(
        ("data_prep.cosmoflow", "simulate", "--universes", "384"),
        ("apps.cosmoflow", "apps/cosmoflow/configs/small.yaml", "train.epochs=4", "train.report_every=10"),
        tiny=("train.epochs=1", "train.report_every=1", "model.filters=2"),
    ),
    "cosmoflow-128": Training(
        ("data_prep.cosmoflow", "simulate", "--universes", "8", "--size", "128"),
        ("apps.cosmoflow", "apps/cosmoflow/configs/small.yaml", "model.size=128", "model.filters=32", "data.batch=4",
         "train.epochs=16", "train.report_every=4", "step.precision=bf16"),
        compared=False,
        tiny=("train.epochs=8", "train.report_every=1", "model.size=32", "model.filters=2"),
    ),
    "llm-small": Training(
        ("data_prep.text", "python"),
        ("apps.llm", "apps/llm/configs/small.yaml", "train.steps=400", "train.report_every=10"),
        variants=((), ("step.precision=bf16",), ("step.precision=bf16", "step.matmul=fp8")),
        tiny=("model.width=64", "model.layers=2", "model.heads=2", "model.inner=128", "train.steps=16", "train.report_every=1"),
    ),
}  # fmt: skip


def main(name: str, folder: Path, tiny: bool) -> int:
    training, data = TRAININGS[name], folder / "data"
    module, *arguments = training.data
    kind, *options = arguments
    options += ["--universes", "24", "--size", "32"] if tiny and module == "data_prep.cosmoflow" else []
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", module, kind, str(data), *options], cwd=ROOT, check=True, stdout=sys.stderr)
    data_s = round(time.monotonic() - started, 1)
    result: dict[str, Any] = {"bench": "training", "case": name, "tiny": tiny, "data_s": data_s, "rows": []}
    gpu = os.environ.get("HPCAI_TEST_DEVICE", "cuda") != "cpu"
    runs = [("gpu", variant) for variant in training.variants if gpu or not variant]
    runs += [("cpu", ()), ("cpu", ("train.seed=1",))] if training.compared else []
    for device, variant in runs:
        args = (*training.args, *(training.tiny if tiny else ()), *variant)
        run = folder / f"run-{len(result['rows'])}"
        result["rows"].append({"run": " ".join((device, *variant)), **train(args, data, run, device == "cpu" and not tiny)})
        print(json.dumps(result), flush=True)
    rows = result["rows"]
    if training.compared:
        cpu = rows[-2]["late_loss"]
        for row in rows:
            row["apart"] = round(abs(row["late_loss"] / cpu - 1), 5)
    noise = max(3 * rows[-1]["apart"], 0.05) if training.compared else float("inf")
    result["learns"] = all(row["late_loss"] < row["first_loss"] for row in rows)
    result["as_on_the_cpu"] = all(row.get("apart", 0.0) <= noise for row in rows[: len(training.variants)])
    print(json.dumps(result), flush=True)
    return int(not (result["learns"] and result["as_on_the_cpu"]))


def train(args: Sequence[str], data: Path, run: Path, on_all_cores: bool) -> dict[str, Any]:
    """Train on the GPU if there is one, or on all cores; return steps, seconds, losses and the last scores."""
    app, *overrides = args
    cores = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} if on_all_cores else {}
    command = [sys.executable, "-m", app, *overrides, f"data.directory={data}", f"report.directory={run}", "report.sinks=[]"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, env={**os.environ, **cores})
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "train"]
    losses = [event["loss"] for event in steps]
    scores = [event for event in events if event["kind"] == "evaluate"][-1:]
    excluded = {"kind", "time", "step", "epoch", "samples", "seconds"}
    last_scores = {key: value for event in scores for key, value in event.items() if key not in excluded}
    return {
        "steps": steps[-1]["step"], "seconds_between": round(steps[-1]["time"] - steps[0]["time"], 2), "first_loss": losses[0],
        "late_loss": round(mean(losses[-max(1, len(losses) // 4) :]), 5), **last_scores,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), "--tiny" in sys.argv[3:]))
