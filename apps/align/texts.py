"""The answers of a run for its report."""

from pathlib import Path
from typing import Any

import numpy as np

from apps.align.settings import Config
from hpcai import log, train
from hpcai.models.llm import Rollouts

SECONDS = "generate_seconds", "score_seconds", "train_seconds"


def save_answers(run: train.Run, cfg: Config, rollouts: Rollouts) -> None:
    """Write ``answers.npz``: fractions of solved held-out prompts by step, rewards and seconds by iteration, and answers."""
    texts = [[prompt, answer, f"{reward:g}"] for prompt, answer, reward in rollouts.last_answers[: cfg.pictures]]
    if run.directory is not None and run.mesh.is_first:
        events = log.read_metrics(run.directory / log.METRICS)
        run.write_file("answers.npz", lambda path: write_answers(path, events, texts))


def write_answers(path: Path, events: list[dict[str, Any]], texts: list[list[str]]) -> None:
    evaluated = [(event["step"], event["solved"]) for event in events if event["kind"] == "evaluate" and "solved" in event]
    sampled = [event for event in events if event["kind"] == "rollout"]
    np.savez_compressed(
        path, evaluated=np.array(evaluated, float).reshape(-1, 2), texts=np.array(texts, str).reshape(-1, 3),
        rewards=np.array([(event["step"], event["reward"]) for event in sampled], float).reshape(-1, 2),
        seconds=np.array([[event[name] for name in SECONDS] for event in sampled], float).reshape(-1, 3),
    )  # fmt: skip
