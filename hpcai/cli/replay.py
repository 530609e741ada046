"""`hpcai replay RUN/failure-...`: make the step in which a run failed once more, and look closer.

The app runs with the settings of the bundle, from the newest whole checkpoint before that step (without one, from the beginning),
in a folder of its own; the run's files stay as they are. The search for what is not finite looks at the batch, at what each module
puts out, and at the gradient of it on the way back. It reads the device after each module, and needs modules that are run one by
one: step.compile and step.capture are none.

A run is replayed on as many processes as trained (those of mesh.evaluate are left out): behind mpiexec, srun or torchrun, which
start `hpcai replay` as they started the run, or without one on this machine. The exit code is 0 where the failure came again, 1
where it did not.
"""

import argparse
import os
import runpy
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcai import config
from hpcai.cli import apps
from hpcai.cli.subprocesses import fork_processes
from hpcai.data.assemble import tree_map
from hpcai.dist.collect import gather_objects
from hpcai.dist.environment import place
from hpcai.errors import ConfigError, DataError
from hpcai.train.failure import read
from hpcai.train.saved import found
from hpcai.train.step import Step

_PATIENCE = 1e6  # seconds: a run that hung is replayed until it hangs again
FAILED_AGAIN, SUCCEEDED = 3, 4  # exit codes of the app: the step is not finite again; it ended well


def main(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="hpcai replay", description=__doc__, formatter_class=form)
    parser.add_argument("bundle", type=Path, metavar="RUN/failure-...", help="a folder that a failed run left")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings that differ, such as data.directory")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="own folder, seen by all processes (BUNDLE/replay)")
    given = parser.parse_intermixed_args(argv)
    bundle = given.bundle.resolve()
    told = read(bundle)
    cause = min(told, key=lambda one: (one["kind"] == "stopped", one["time"]))
    if cause["run"] not in apps.list_apps():
        raise ConfigError(f"{bundle}: the run was of {cause['run']!r}; expected one of the apps {', '.join(apps.list_apps())}")
    here = place()
    cause["world"] -= cause["settings"]["mesh"].get("evaluate", 0)
    if here.world not in (None, 1, cause["world"]):
        raise ConfigError(f"{here.world} processes were started, but the run trained on {cause['world']}; start as many")
    first = here.rank == 0
    scratch = (given.scratch or bundle / "replay").resolve()
    start = link_checkpoints(bundle.parent / "checkpoints", scratch, cause["step"])
    if first:
        where = f"from step {start}" if start else "from the beginning, for there is no checkpoint before it"
        print(f"{cause['run']}, step {cause['step']}: {cause['kind']} on rank {cause['rank']}; made again {where}", flush=True)
    try:
        code = _rerun(cause, told, scratch, given.words, alone=here.world == 1)
    finally:
        if first:
            shutil.rmtree(scratch, ignore_errors=True)
    if first:
        print(f"step {cause['step']} " + ("ended well: the failure did not come again" if code == SUCCEEDED else "failed again"))
    return int(code == SUCCEEDED)


def link_checkpoints(checkpoints: Path, scratch: Path, step: int) -> int:
    """Put links to the checkpoints before ``step`` into ``scratch`` -> the number of the newest. Several processes may do so
    at once. Whether they are whole is seen when the run goes on from one.
    """
    older = [path for path in found(checkpoints) if int(path.name.removeprefix("step-")) < step]
    try:
        for path in older:
            own = scratch / "checkpoints" / path.name
            own.mkdir(parents=True, exist_ok=True)
            for file in path.iterdir():
                with suppress(FileExistsError):
                    (own / file.name).symlink_to(file)
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise DataError(f"{scratch}: {problem.strerror}; name another folder with --scratch") from problem
    return max((int(path.name.removeprefix("step-")) for path in older), default=0)


def _rerun(cause: dict[str, Any], told: list[dict[str, Any]], scratch: Path, more: Sequence[str], alone: bool) -> int:
    """Run the app -> its exit code."""
    samples = {one["rank"]: one.get("samples") for one in told}
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        settings = Path(folder) / "settings.yaml"
        settings.write_text(config.dump(cause["settings"]))
        words = [str(settings), f"report.directory={scratch}", "report.sinks=[]", "train.report_every=1", "train.profile=null",
                 "step.compile=none", "step.compile_cache=null", "step.capture=none", "mesh.evaluate=0", *more]  # fmt: skip

        def enter() -> None:
            if Path(cause.get("folder", "")).is_dir():
                os.chdir(cause["folder"])  # paths of the settings may be relative
            with _search_step(cause["step"], samples):
                sys.argv = [cause["run"], *words]
                runpy.run_module(f"apps.{cause['run']}", run_name="__main__")

        if not alone or cause["world"] == 1:
            return _exit_code(enter)
        if torch.cuda.is_available() and torch.cuda.device_count() < cause["world"]:
            raise ConfigError(f"the run trained on {cause['world']} processes, and this machine has fewer GPUs; start as many "
                              f"behind a launcher: srun -n {cause['world']} hpcai replay ...")  # fmt: skip
        with fork_processes(enter, Path(folder) / "said", cause["world"]) as forks:
            codes, text = forks.wait(_PATIENCE)
        print(text, end="")
        other = [code if code is not None else 1 for code in codes if code not in (FAILED_AGAIN, SUCCEEDED)]
        return FAILED_AGAIN if FAILED_AGAIN in codes else other[0] if other else SUCCEEDED


def _exit_code(enter: Callable[[], object]) -> int:
    try:
        enter()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # the run's, which one process does not end by itself
        traceback.print_exc()
        return 1
    return SUCCEEDED


@contextmanager
def _search_step(number: int, samples: dict[int, Any]) -> Iterator[None]:
    """Inside, the step with this number from 1 is looked at, and the run ends with it."""
    usual = Step.__call__

    def call(step: Step, batch: Any, lr: float | None = None) -> Any:
        if step.count + 1 < number:
            return usual(step, batch, lr)
        with search_non_finite(step.model, batch) as seen:
            usual(step, batch, lr)
        bad = int(step.first_bad()[0].item()) == number - 1
        every = gather_objects(tuple(seen), step.mesh.everyone)
        if step.mesh.is_first and bad:
            for rank, lines in enumerate(every):
                read = ", ".join(f"{one['index']} ({one['text']})" for one in samples.get(rank) or ())
                print(f"rank {rank}, samples {read or 'not known'}:")
                print("\n".join(f"  {line}" for line in lines or ("all modules and gradients are finite here",)), flush=True)
        raise SystemExit(FAILED_AGAIN if bad else SUCCEEDED)

    Step.__call__ = call  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Step.__call__ = usual  # type: ignore[method-assign]


@contextmanager
def search_non_finite(model: nn.Module, batch: Any) -> Iterator[list[str]]:
    """Inside, modules are looked at as they run; afterwards the list says what was not finite first: in the batch, among outputs,
    and among the gradients of outputs, which are found from the last module to the first."""
    seen: list[str] = []
    kinds: set[str] = set()

    def once(kind: str, text: str) -> None:
        if kind not in kinds:
            kinds.add(kind)
            seen.append(text)

    def back(name: str, gradient: Tensor) -> None:
        if not kinds & {"batch", "output"} and not _is_finite(gradient):  # otherwise it follows from them
            once("gradient", f"going back, the first gradient that is not finite is that of the output of {name}")

    def forward(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not _is_finite(output):
            fed = "the first whose output is not finite" + ("" if _is_finite(inputs) else "; neither was its input")
            once("output", f"{name} ({type(module).__name__}) is {fed}")
        for tensor in _float_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(back, name))

    if not _is_finite(batch):
        once("batch", "the batch itself is not finite")
    hooks = [module.register_forward_hook(partial(forward, name or "the model")) for name, module in model.named_modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
    if kinds == {"gradient"}:
        seen.insert(0, "all outputs are finite: the loss or the way back makes it")


def _float_tensors(tree: Any) -> list[Tensor]:
    leaves: list[Any] = []
    tree_map(tree, leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_finite(tree: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _float_tensors(tree))
