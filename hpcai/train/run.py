"""The folder of one run: settings.yaml, metrics.jsonl, checkpoints/, and what an app leaves there for people."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcai import config, log
from hpcai.dist.mesh import Mesh
from hpcai.train.checkpoint import Checkpoints


class Run:
    """Reports and checkpoints of a run with the settings ``cfg``, which has ``report`` and ``checkpoint`` sections.

    Without settings, or with ``report.directory: null``, nothing is written. A context manager: the sinks are closed at its end.
    """

    def __init__(self, name: str, cfg: Any, mesh: Mesh) -> None:
        if cfg is not None:  # a notebook keeps its own logging
            log.setup(mesh.job.rank, mesh.job.size)
        self.name, self.mesh = name, mesh
        self.settings: dict[str, Any] = cfg.model_dump(mode="json") if cfg is not None else {}
        self.directory: Path | None = cfg.report.directory if cfg is not None else None
        self.reports = log.reports(cfg.report, mesh) if cfg is not None else log.Reports()
        self.checkpoints: Checkpoints | None = None
        self._cfg = cfg
        if self.directory is not None:
            self.checkpoints = Checkpoints(self.directory / "checkpoints", cfg.checkpoint, mesh, self.settings)

    def begin(self) -> None:
        """Called by ``fit`` once nothing stands against the run: a refused one leaves the files of an earlier life alone."""
        self.keep("settings.yaml", lambda path: path.write_text(config.dump(self._cfg)))

    def keep(self, name: str, write: Callable[[Path], Any]) -> None:
        """``write(path)`` a file of the run on the first process, beside its place, with its suffix, and then renamed."""
        if self.directory is not None and self.mesh.is_first:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".partial.{path.name}")
            write(partial)
            partial.replace(path)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.reports.close()
