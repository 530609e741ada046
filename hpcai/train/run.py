"""The directory of a run: settings.yaml, metrics.jsonl, checkpoints/, and the results that an app leaves there."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from torch import Tensor

from hpcai import config, log
from hpcai.dist.collectives import broadcast_object
from hpcai.dist.mesh import Mesh
from hpcai.durable import lock_directory, unlock_directory
from hpcai.errors import CheckpointError
from hpcai.mllog import Benchmark, MlperfLog
from hpcai.nn.weights import PretrainedMixin
from hpcai.stop import REQUEUE
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress, export
from hpcai.train.evaluation import PredictFunction, predict
from hpcai.train.flight_recorder import FlightRecorder
from hpcai.train.step import Step
from hpcai.train.throughput import SampleCost


@dataclass
class Report:
    """Metrics of the steps up to ``step``. ``report["loss"]`` and other training metrics are means since the previous report."""

    step: int
    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass
class Result:
    """The result of a run: why it ended (``finished``, ``target`` or ``signal``), and its reports. Iterating yields its training
    reports."""

    reason: str
    progress: Progress
    reports: list[Report] = field(default_factory=list)
    evaluations: list[Report] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return REQUEUE if self.reason == "signal" else 0

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)


class Run(AbstractContextManager["Run"]):
    """Reports and checkpoints of a run with the settings ``cfg``, which has ``report`` and ``checkpoint`` sections. Without
    settings, or with ``report.directory: null``, nothing is written. ``benchmark``: the entries of its MLPerf log. ``cost``: of a
    sample, for the reports. As a context manager it closes the sinks on exit."""

    def __init__(self, name: str, cfg: Any, mesh: Mesh, benchmark: Benchmark | None = None, cost: SampleCost | None = None) -> None:
        self.name, self.mesh, self._cfg, self.cost = name, mesh, cfg, cost or SampleCost()
        self.settings: dict[str, Any] = {}
        self.directory: Path | None = None
        self.reports = log.Reports()
        if cfg is not None:
            log.setup(mesh.job.rank, mesh.job.size)  # a notebook has logging of its own
            self.settings, self.directory = cfg.model_dump(mode="json"), cfg.report.directory
            mlperf = None if benchmark is None else lambda path, echo: MlperfLog(path, benchmark, echo)
            self.reports = log.open_reports(self.directory, cfg.report.sinks, mesh.is_first, mlperf, cfg.report.project)
        self.checkpoints: Checkpoints | None = None
        self.flight_recorder = FlightRecorder(name, self.directory, self.settings, mesh)
        self._owner: IO[str] | None = None
        if self.directory is not None:
            self.checkpoints = Checkpoints(self.directory / "checkpoints", cfg.checkpoint, mesh, self.settings, schema=type(cfg))
            self.reports.sinks += (self.flight_recorder,)
            logging.getLogger().addHandler(self.flight_recorder)

    def begin(self) -> None:
        """Claim the directory and write the settings. ``fit`` calls it after all other checks, so that a rejected run changes no
        file. Raises CheckpointError on all ranks if another run uses the directory, or it cannot be written."""
        problem = ""
        if self.directory is not None and self.mesh.is_first:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._owner = self._owner or lock_directory(self.directory)
                if self.checkpoints is not None:
                    self.checkpoints.open_directory()
                self.write_file("settings.yaml", lambda path: path.write_text(config.dump(self._cfg)))
                self.flight_recorder.arm()
            except OSError as error:
                problem = f"{error.filename or self.directory}: {error.strerror}; choose another report.directory"
            except CheckpointError as error:
                problem = str(error)
        if problem := broadcast_object(problem, self.mesh.peers):
            raise CheckpointError(problem)
        self.flight_recorder.arm()

    def write_file(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write a file of the run, on the first rank: ``write(path)`` writes a temporary file, which is then renamed."""
        if self.directory is not None and self.mesh.is_first:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".partial.{path.name}")
            write(partial)
            partial.replace(path)

    def file_writer(self, name: str, write: Callable[..., Any], *args: Any) -> Callable[[Any], None]:
        """Return a function that writes its argument to the file ``name``, by ``write(path, argument, *args)``."""
        return lambda rows: self.write_file(name, lambda path: write(path, rows, *args))

    def array_writer(self, name: str, **arrays: Any) -> Callable[[dict[str, Tensor]], None]:
        """Return a function that writes tensors by name to the .npz file ``name``, beside ``arrays``."""

        def write(path: Path, rows: dict[str, Tensor]) -> None:
            np.savez_compressed(path, **arrays, **{name: values.numpy() for name, values in rows.items()})  # type: ignore[arg-type]

        return self.file_writer(name, write)

    def finish(
        self, step: Step, result: Result, function: PredictFunction | None = None, batches: Any = None,
        save_rows: Callable[[dict[str, Tensor]], Any] = lambda rows: None,
    ) -> None:  # fmt: skip
        """Write the final files of a run; all ranks call this together. They are the model's ``files``, such as model.safetensors
        of the last checkpoint, and the rows of ``function`` for ``batches``, if there are any: all ranks call ``save_rows``, with
        rows on the first rank only. A run that was stopped by a signal writes nothing, since it will be resumed."""
        if result.reason == "signal":
            return
        checkpoints = self.checkpoints
        if checkpoints is not None and isinstance(step.model, PretrainedMixin):
            load = type(step.model).load
            files = step.model.output_files(lambda path, **kwargs: export(checkpoints.paths()[-1], path, load, **kwargs))
            for name, write in files.items():
                self.write_file(name, write)
        if function is not None and batches is not None:
            save_rows(predict(step, function, batches))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.flight_recorder.record(error)
        logging.getLogger().removeHandler(self.flight_recorder)
        self.reports.close()
        if self._owner is not None:
            unlock_directory(self._owner)
            self._owner = None
