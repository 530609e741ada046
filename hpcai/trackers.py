"""Sinks of Weights & Biases and MLflow. ``trackers.toml`` has the defaults of their environment variables."""

import json
import os
import re
import secrets
import time
import tomllib
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from hpcai.durable import write_json
from hpcai.log import Event, flatten, logger, name_scalars, to_strict_json
from hpcai.stop import REQUEUE


class Tracker:
    """A sink that calls the package of a tracker in a thread: no slow or absent server delays or ends a run.

    ``run.json`` has the tracker's id of the run, which a resumed run continues, and the last step by kind of event. Trackers cannot
    remove values: steps that a resumed run repeats keep their first values.
    """

    open: Any
    log: Any
    finish: Any

    def __init__(self, directory: Path, project: str | None) -> None:
        for name, value in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
            os.environ.setdefault(name, value)
        self.package, self.directory, self.project = import_module(directory.name), directory.resolve(), project
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.write = self._events.put
        self._state: dict[str, Any] = {}
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End a run that had no `stop` event as failed, and wait."""
        self.write(Event("stop", time.time(), {"reason": "failed"}))
        self._thread.join(30)  # a scheduler kills a job soon after its signal, and the exit code would be lost
        if self._thread.is_alive():
            logger.warning("%s does not answer; its last values are lost", type(self).__name__)

    def _run(self) -> None:
        try:
            for event in iter(self._events.get, None):
                if event.kind == "start" or self._state:  # notes may precede it
                    self._handle(event)
                if event.kind == "stop":
                    break
        except Exception as error:
            logger.warning("%s cannot write (%r); the run continues without it", type(self).__name__, error)

    def _handle(self, event: Event) -> None:
        kind, fields, path = event.kind, event.fields, self.directory / "run.json"
        if kind == "start":
            resumed = fields.get("resumed_from") is not None and path.exists()
            self._state = json.loads(path.read_text()) if resumed else {}
            self._earlier = self._state.copy()
            job = {name: value for name, value in fields.items() if name != "settings"}
            self._state["id"] = self.open(self._state.get("id"), fields["name"], to_strict_json({**fields["settings"], "job": job}))
        elif kind in ("energy", "stop"):
            self.log({f"{kind}/{name}": value for name, value in to_strict_json(fields).items()}, event)
        elif (scalars := name_scalars(event)) and fields["step"] > self._earlier.get(kind, -1):
            self.log(scalars, event)
            self._state[kind] = fields["step"]
        write_json(path, self._state)
        if kind == "stop":
            self.finish(fields["reason"])


class Wandb(Tracker):
    """The sink of Weights & Biases: online with an API key and a server, otherwise offline."""

    def open(self, id: str | None, app: str, settings: dict[str, Any]) -> str:
        from requests.utils import get_netrc_auth

        env, run, mode = os.environ, self.directory.parent, os.environ.get("WANDB_MODE", "online")
        env.setdefault("WANDB_CACHE_DIR", f"{self.directory}/cache")
        id = id or env.get("WANDB_RUN_ID") or secrets.token_hex(4)
        init = partial(
            self.package.init, project=self.project or env.get("WANDB_PROJECT", app), name=env.get("WANDB_NAME", run.name), id=id,
            resume="allow", dir=env.get("WANDB_DIR", run), config=settings, allow_val_change=True, reinit="create_new",
        )  # fmt: skip
        key = env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE")
        if mode == "online" and not key and get_netrc_auth(env.get("WANDB_BASE_URL", "https://api.wandb.ai")) is None:
            mode = "offline"  # otherwise W&B asks for a key at the terminal
        try:
            self._wandb = init(mode=mode)
        except self.package.Error as error:
            logger.warning("W&B cannot go online (%s)", error)
            self.package.teardown()  # its process still claims the id
            self._wandb = init(mode=(mode := "offline"))
        if mode == "offline":
            logger.info("W&B is offline; to upload the run later: wandb sync %s", env.get("WANDB_DIR", run) / Path("wandb"))
        self._wandb.define_metric("*", step_metric="step")  # W&B's own steps cannot return to that of a checkpoint
        return id

    def log(self, values: Mapping[str, Any], event: Event) -> None:
        if event.kind in ("energy", "stop"):
            self._wandb.summary.update(values)
        else:
            self._wandb.log({"step": event.fields["step"], **values})

    def finish(self, reason: str) -> None:
        if reason == "signal":
            self._wandb.mark_preempting()
        self._wandb.finish(exit_code={"finished": 0, "target": 0, "signal": REQUEUE}.get(reason, 1))


class Mlflow(Tracker):
    """The sink of MLflow, with the server at ``MLFLOW_TRACKING_URI`` or files."""

    def open(self, id: str | None, app: str, settings: dict[str, Any]) -> str:
        self._client = client = self.package.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or str(self.directory))
        if id is None:
            experiment = self.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", app)
            try:
                number = client.create_experiment(experiment)
            except self.package.MlflowException:  # it exists; another run may have created it just now
                number = client.get_experiment_by_name(experiment).experiment_id
            id = client.create_run(number, run_name=self.directory.parent.name).info.run_id
        self._id: str = id
        client.update_run(id, status="RUNNING")
        params, known = flatten(settings).items(), client.get_run(id).data.params  # which cannot change
        added = [self.package.entities.Param(_key(name), str(value)[:6000]) for name, value in params if _key(name) not in known]
        for first in range(0, len(added), 100):  # MLflow's limit of a request
            client.log_batch(id, params=added[first : first + 100])
        return id

    def log(self, values: Mapping[str, Any], event: Event) -> None:
        kinds, at = self.package.entities, (int(1000 * event.time), event.fields.get("step", 0))
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        metrics = [kinds.Metric(_key(name), value, *at) for name, value in numbers.items()]
        tags = [kinds.RunTag(_key(name), str(value)) for name, value in values.items() if name not in numbers]
        self._client.log_batch(self._id, metrics, tags=tags)

    def finish(self, reason: str) -> None:
        if reason == "signal":
            self._client.update_run(self._id, status="SCHEDULED")
        else:
            self._client.set_terminated(self._id, "FINISHED" if reason in ("finished", "target") else "FAILED")


def _key(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)[:250]  # MLflow's characters and length
