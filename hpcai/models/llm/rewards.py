"""Rewards of sampled answers, by a Python function or by a program."""

import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from hpcai.errors import ConfigError, DataError
from hpcai.models.llm.alignment_config import RewardConfig

Function = Callable[..., Sequence[float | None]]


class Rewards:
    """The rewards of answers by ``cfg``, or by ``function``, as ``rewards(prompts, answers, columns)``, in float.

    ``columns``: The further values of each prompt, by name. Raises ConfigError for a function that cannot be imported, and, unless
    ``cfg.on_failure`` is zero, DataError for an exception, the time limit, and a reward that is not finite. ``failures`` counts
    rewards that were set to 0.
    """

    def __init__(self, cfg: RewardConfig, function: Function | None = None) -> None:
        self.cfg, self.failures, self.last_failure = cfg, 0, ""
        self.name = cfg.function or " ".join(cfg.program) or getattr(function, "__name__", "the function")
        self._function = _import_function(cfg.function) if cfg.function else function
        if self._function is None and not cfg.program:
            raise ConfigError("reward has neither function nor program nor model; set one of them")

    def __call__(self, prompts: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        if self.cfg.program:
            rows = [{name: column[n] for name, column in columns.items()} for n in range(len(prompts))]
            with ThreadPoolExecutor(self.cfg.workers) as pool:
                results = list(pool.map(self._run_program, prompts, answers, rows))
        else:
            results = self._call_function(prompts, answers, columns)
        rewards = []
        for prompt, answer, result in zip(prompts, answers, results):
            problem = result if isinstance(result, str) else "" if math.isfinite(result) else f"the reward is {result}"
            if problem:
                text = f"reward by {self.name}: answer {_shorten(answer)} to prompt {_shorten(prompt)}: {problem}"
                if self.cfg.on_failure == "stop":
                    raise DataError(f"{text}; expected a finite number; mend it, or set reward.on_failure=zero")
                self.failures, self.last_failure = self.failures + 1, text
            rewards.append(0.0 if isinstance(result, str) or problem else float(result))
        return rewards

    def _call_function(
        self, prompts: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | str]:
        """Return the rewards of all answers by one call, or if it fails by a call for each, with an error message in place of its
        reward."""
        outcome = self._call_in_time(prompts, answers, columns)
        if not isinstance(outcome, str):
            if len(outcome) != len(prompts):
                text = f"reward by {self.name}: returned {len(outcome)} rewards of {len(prompts)} answers"
                raise DataError(f"{text}; return one for each")
            return outcome
        if len(prompts) == 1:
            return [outcome]
        results = list[float | str]()
        for n, (prompt, answer) in enumerate(zip(prompts, answers)):
            results += self._call_function([prompt], [answer], {name: column[n : n + 1] for name, column in columns.items()})
            if isinstance(results[-1], str) and self.cfg.on_failure == "stop":
                return [*results, *[outcome] * (len(prompts) - len(results))]
        return results

    def _call_in_time(
        self, prompts: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | str] | str:
        """Return the rewards by one call in a thread, or an error message."""
        outcome = list[Any]()

        def call() -> None:
            try:
                assert self._function is not None
                values = self._function(prompts=[*prompts], completions=[*answers], **{k: [*v] for k, v in columns.items()})
                outcome.append([math.nan if value is None else float(value) for value in values])
            except Exception as error:
                outcome.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=call, name="reward", daemon=True)
        thread.start()
        thread.join(self.cfg.timeout)
        return outcome[0] if outcome else f"it did not return within {self.cfg.timeout:g} s (reward.timeout)"

    def _run_program(self, prompt: str, answer: str, columns: Mapping[str, Any]) -> float | str:
        """Return the number that the program writes for an answer, or an error message. It is ended with all that it started."""
        try:
            process = subprocess.Popen(
                self.cfg.program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"reward.program {self.name}: cannot be started ({error.strerror}); name another") from error
        try:
            content = json.dumps({**columns, "prompt": prompt, "completion": answer})
            output, errors = process.communicate(content, timeout=self.cfg.timeout)
        except subprocess.TimeoutExpired:
            return f"the program did not end within {self.cfg.timeout:g} s (reward.timeout)"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode:
            return f"exit code {process.returncode}: {_shorten(errors.strip().rpartition(chr(10))[2])}"
        try:
            return float(output)
        except ValueError:
            return f"the program wrote {_shorten(output)}"


def _import_function(path: str) -> Function:
    module, _, name = path.partition(":")
    try:
        function: Any = import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        problem = f"reward.function {path}: cannot be imported ({error})"
        raise ConfigError(f"{problem}; expected module:function of an installed module or a file in the current folder") from error
    if not callable(function):
        raise ConfigError(f"reward.function {path}: is a {type(function).__name__}; expected a function")
    return function


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
