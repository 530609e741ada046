"""`hpcai replay RUN/failure-...`: repeat the step in which a run failed, and search it for non-finite values.

The app runs with the settings of the bundle, from the newest complete checkpoint before that step (or from the beginning), in a
scratch folder; the run's files are unchanged. The search checks the batch, the output of each module, and the gradient of each
output in the backward pass. It synchronizes with the device after each module, and needs modules that run separately: step.compile
and step.capture are none.

A run is replayed on the number of processes that trained (mesh.evaluate excluded): behind mpiexec, srun or torchrun, with `hpcai
replay` in place of the run, or without a launcher on this machine. The exit code is 0 if the failure occurs again, and 1 if not.
"""

import os
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from hpcai import config
from hpcai.cli import apps, make_parser
from hpcai.dist.environment import read_rank_info
from hpcai.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

_PATIENCE = 1e6  # seconds; a run that hung is replayed until it hangs again
FAILED_AGAIN, SUCCEEDED = 3, 4  # exit codes of the app: the step is non-finite again; or finite


def main(argv: Sequence[str]) -> int:
    args = make_parser("replay", __doc__).parse_intermixed_args(argv)

    from hpcai.train.flight_recorder import read_bundle  # imports torch

    bundle = args.bundle.resolve()
    reports = read_bundle(bundle)
    failure = min(reports, key=lambda report: (report["kind"] == "stopped", report["time"]))
    if failure["run"] not in apps.list_apps():
        raise ConfigError(f"{bundle}: the run was of {failure['run']!r}; expected one of the apps {', '.join(apps.list_apps())}")
    rank_info = read_rank_info()
    failure["world"] -= failure["settings"]["mesh"].get("evaluate", 0)
    if rank_info.world not in (None, 1, failure["world"]):
        raise ConfigError(f"{rank_info.world} processes were started, but the run trained on {failure['world']}; start as many")
    is_first = rank_info.rank == 0
    scratch = (args.scratch or bundle / "replay").resolve()
    start = link_checkpoints(bundle.parent / "checkpoints", scratch, failure["step"])
    if is_first:
        text = f"from step {start}" if start else "from the beginning, since there is no checkpoint before it"
        print(f"{failure['run']}, step {failure['step']}: {failure['kind']} on rank {failure['rank']}; repeated {text}", flush=True)
    try:
        code = _rerun(failure, reports, scratch, args.overrides, alone=rank_info.world == 1)
    finally:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)
    if is_first:
        print(f"step {failure['step']} " + ("succeeded: the failure did not occur again" if code == SUCCEEDED else "failed again"))
    return int(code == SUCCEEDED)


def link_checkpoints(checkpoints: Path, scratch: Path, step: int) -> int:
    """Link the checkpoints before ``step`` into ``scratch``, and return the number of the newest. Several processes may do so at
    once. Whether they are complete is checked when the run resumes from one."""
    from hpcai.train.checkpoint_reader import list_checkpoints, step_number

    older = [path for path in list_checkpoints(checkpoints) if step_number(path) < step]
    try:
        for path in older:
            target = scratch / "checkpoints" / path.name
            target.mkdir(parents=True, exist_ok=True)
            for file in path.iterdir():
                with suppress(FileExistsError):
                    (target / file.name).symlink_to(file)
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise DataError(f"{scratch}: {problem.strerror}; name another folder with --scratch") from problem
    return max(map(step_number, older), default=0)


def _rerun(failure: dict[str, Any], reports: list[dict[str, Any]], scratch: Path, overrides: Sequence[str], alone: bool) -> int:
    import torch

    from hpcai.cli.subprocesses import ForkedProcesses

    samples = {report["rank"]: report.get("samples") for report in reports}
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        settings = Path(folder) / "settings.yaml"
        settings.write_text(config.dump(failure["settings"]))
        args = [str(settings), f"report.directory={scratch}", "report.sinks=[]", "train.report_every=1", "train.profile=null",
                 "step.compile=none", "step.compile_cache=null", "step.capture=none", "mesh.evaluate=0", *overrides]  # fmt: skip

        def run_app() -> None:
            if Path(failure.get("folder", "")).is_dir():
                os.chdir(failure["folder"])  # paths of the settings may be relative
            with _search_step(failure["step"], samples):
                sys.argv = [failure["run"], *args]
                runpy.run_module(f"apps.{failure['run']}", run_name="__main__")

        if not alone or failure["world"] == 1:
            try:
                run_app()
            except SystemExit as end:
                if end.code == 128 + signal.SIGINT:
                    raise
                return end.code if isinstance(end.code, int) else int(end.code is not None)
            except Exception:  # of the run; a single process does not exit by itself
                traceback.print_exc()
                return 1
            return SUCCEEDED
        if torch.cuda.is_available() and torch.cuda.device_count() < failure["world"]:
            raise ConfigError(f"the run trained on {failure['world']} processes, and this machine has fewer GPUs; start as many "
                              f"behind a launcher: srun -n {failure['world']} hpcai replay ...")  # fmt: skip
        with ForkedProcesses(run_app, Path(folder) / "said", failure["world"]) as forks:
            codes, text = forks.wait(_PATIENCE)
        print(text, end="")
        other_codes = [code if code is not None else 1 for code in codes if code not in (FAILED_AGAIN, SUCCEEDED)]
        return FAILED_AGAIN if FAILED_AGAIN in codes else other_codes[0] if other_codes else SUCCEEDED


@contextmanager
def _search_step(number: int, samples: dict[int, Any]) -> Iterator[None]:
    """Context manager: the step with this number, from 1, is searched, and the run ends with it."""
    from hpcai.dist.collectives import all_gather_object
    from hpcai.train.step import Step

    original = Step.__call__

    def call(step: Step, batch: Any, lr: float | None = None) -> Any:
        if step.count + 1 < number:
            return original(step, batch, lr)
        with search_non_finite(step.model, batch) as findings:
            original(step, batch, lr)
        failed = int(step.first_failures()[0].item()) == number - 1
        descriptions = all_gather_object(tuple(findings), step.mesh.peers)
        if step.mesh.is_first and failed:
            for rank, lines in enumerate(descriptions):
                names = ", ".join(f"{sample['index']} ({sample['text']})" for sample in samples.get(rank) or ())
                print(f"rank {rank}, samples {names or 'not known'}:")
                print("\n".join(f"  {line}" for line in lines or ("all modules and gradients are finite",)), flush=True)
        raise SystemExit(FAILED_AGAIN if failed else SUCCEEDED)

    with mock.patch.object(Step, "__call__", call):
        yield


@contextmanager
def search_non_finite(model: "nn.Module", batch: Any) -> Iterator[list[str]]:
    """Context manager: search modules as they run. The list then describes the first non-finite values: in the batch, among
    outputs, and among the gradients of outputs, which are visited from the last module to the first."""
    findings: list[str] = []
    kinds: set[str] = set()

    def add_first(kind: str, text: str) -> None:
        if kind not in kinds:
            kinds.add(kind)
            findings.append(text)

    def backward(name: str, gradient: "Tensor") -> None:
        if not kinds & {"batch", "output"} and not _is_finite(gradient):  # otherwise a consequence of them
            add_first("gradient", f"backward: the first non-finite gradient is that of the output of {name}")

    def forward(name: str, module: "nn.Module", inputs: Any, output: Any) -> None:
        if not _is_finite(output):
            text = "the first module with a non-finite output" + ("" if _is_finite(inputs) else "; its input was non-finite too")
            add_first("output", f"{name} ({type(module).__name__}) is {text}")
        for tensor in _float_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(backward, name))

    if not _is_finite(batch):
        add_first("batch", "the batch itself is non-finite")
    hooks = [module.register_forward_hook(partial(forward, name or "the model")) for name, module in model.named_modules()]
    try:
        yield findings
    finally:
        for hook in hooks:
            hook.remove()
    if kinds == {"gradient"}:
        findings.insert(0, "all outputs are finite: the loss or the backward pass causes it")


def _float_tensors(tree: Any) -> "list[Tensor]":
    from torch import Tensor

    from hpcai.data.collate import tree_map

    leaves: list[Any] = []
    tree_map(tree, leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_finite(tree: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _float_tensors(tree))
