"""The folder of one run: settings.yaml, metrics.jsonl, checkpoints/, and what an app leaves there for people."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch import Tensor

from hpcai import config, log
from hpcai.dist.collectives import broadcast_object
from hpcai.dist.mesh import Mesh
from hpcai.durable import lock_directory, unlock_directory
from hpcai.errors import CheckpointError
from hpcai.mllog import Benchmark, MlperfLog
from hpcai.nn.weights import Portable
from hpcai.stop import REQUEUE
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.evaluation import RowsOf, predict
from hpcai.train.failure import Failures
from hpcai.train.saved import Progress, export
from hpcai.train.step import Step


@dataclass
class Report:
    """The measurements up to ``step``. ``report["loss"]`` and the other names are means since the report before."""

    step: int
    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass
class Result:
    """How a run ended: ``finished``, ``target`` or ``signal``. Iterating gives its training reports."""

    reason: str
    progress: Progress
    reports: list[Report] = field(default_factory=list)
    evaluations: list[Report] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return REQUEUE if self.reason == "signal" else 0

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)


class Run:
    """Reports and checkpoints of a run with the settings ``cfg``, which has ``report`` and ``checkpoint`` sections.

    Without settings, or with ``report.directory: null``, nothing is written. ``benchmark`` is what its MLPerf log says. As a
    context manager it closes the sinks at its end.
    """

    def __init__(self, name: str, cfg: Any, mesh: Mesh, benchmark: Benchmark | None = None) -> None:
        if cfg is not None:  # a notebook keeps its own logging
            log.setup(mesh.job.rank, mesh.job.size)
        self.name, self.mesh = name, mesh
        self.settings: dict[str, Any] = cfg.model_dump(mode="json") if cfg is not None else {}
        self.directory: Path | None = cfg.report.directory if cfg is not None else None
        self.reports = log.Reports()
        if cfg is not None:
            mlperf = None if benchmark is None else lambda path, echo: MlperfLog(path, benchmark, echo)
            self.reports = log.open_reports(self.directory, cfg.report.sinks, mesh.is_first, mlperf)
        self.checkpoints: Checkpoints | None = None
        self.failures = Failures(name, self.directory, self.settings, mesh)
        self._cfg = cfg
        self._owner: IO[str] | None = None
        if self.directory is not None:
            self.checkpoints = Checkpoints(self.directory / "checkpoints", cfg.checkpoint, mesh, self.settings)
            self.reports.sinks += (self.failures,)
            logging.getLogger().addHandler(self.failures)

    def begin(self) -> None:
        """Take the directory and write the settings. ``fit`` calls it once nothing stands against the run, so that a refused one
        changes no file. Raises CheckpointError on all processes where another run uses the directory or nothing can be written."""
        problem = ""
        if self.directory is not None and self.mesh.is_first:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._owner = self._owner or lock_directory(self.directory)
                (self.directory / "checkpoints").mkdir(exist_ok=True)
                self.keep("settings.yaml", lambda path: path.write_text(config.dump(self._cfg)))
                self.failures.arm()
            except (OSError, CheckpointError) as error:
                problem = str(error)
                if isinstance(error, OSError):
                    problem = f"{error.filename or self.directory}: {error.strerror}; choose another report.directory"
        if problem := broadcast_object(problem, self.mesh.peers):
            raise CheckpointError(problem)
        self.failures.arm()

    def keep(self, name: str, write: Callable[[Path], Any]) -> None:
        """Keep a file of the run, on the first process: ``write(path)`` makes it beside its place, then it is renamed."""
        if self.directory is not None and self.mesh.is_first:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".partial.{path.name}")
            write(partial)
            partial.replace(path)

    def writer(self, name: str, write: Callable[..., Any], *words: Any) -> Callable[[Any], None]:
        """A function that keeps what it is given as the file ``name``, by ``write(path, found, *words)``."""
        return lambda found: self.keep(name, lambda path: write(path, found, *words))

    def finish(
        self, step: Step, result: Result, function: RowsOf | None = None, batches: Any = None,
        keep: Callable[[dict[str, Tensor]], Any] = lambda rows: None,
    ) -> None:  # fmt: skip
        """Leave the model's ``files`` for people, such as model.safetensors of the last checkpoint, and ``keep`` the rows that
        ``function`` gives for ``batches``, if there are any: all processes call it, and the first alone has rows. A run that was
        asked to stop leaves nothing: it goes on later. All processes call this together."""
        if result.reason == "signal":
            return
        checkpoints = self.checkpoints
        if checkpoints is not None and isinstance(step.model, Portable):
            load = type(step.model).load
            files = step.model.files(lambda path, **words: export(checkpoints.found()[-1], path, load, **words))
            for name, write in files.items():
                self.keep(name, write)
        if function is not None and batches is not None:
            keep(predict(step, function, batches))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.failures.tell(error)
        logging.getLogger().removeHandler(self.failures)
        self.reports.close()
        if self._owner is not None:
            unlock_directory(self._owner)
            self._owner = None
