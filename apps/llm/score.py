"""Evaluate a model:  python -m apps.llm score weights=FOLDER data=FOLDER|tasks=FILE.jsonl [mesh.tensor=2 ...]

For rows of ``data_prep.text``: nats of a token (loss), perplexity, bits per byte. For questions, each a line
{"context": "...", "choices": ["...", ...], "answer": 0}: the fraction whose most likely choice is the answer (accuracy), and the
same for log likelihoods divided by the length of the choice in bytes (accuracy_norm).
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import model_validator

from apps.llm.prompting import PromptingConfig, load_model, run_command
from hpcai.config import PositiveInt
from hpcai.errors import ConfigError, DataError
from hpcai.json_file import read_json_lines
from hpcai.programs import command_of

EXPECTED = '{"context": "The sky is", "choices": [" blue", " green"], "answer": 0}'


class ScoreConfig(PromptingConfig):
    """Rows or questions for the evaluation of a model."""

    data: Path | None = None
    """folder of rows of `data_prep.text`; its validation rows are scored"""
    rows: PositiveInt | None = None
    """number of rows to score, from the first; null: all"""
    batch: PositiveInt = 8
    """texts in a batch of a model replica"""
    documents: Literal["apart", "joined"] = "apart"
    """apart: a token attends within its document; joined: to all before it in its row"""
    judge: Literal["all", "answers"] = "all"
    """tokens of rows that are scored"""
    tasks: Path | None = None
    """file of JSON lines, each a question with choices"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.data is None and self.tasks is None:
            raise ValueError("neither data nor tasks is given; give a folder of rows, or a file of questions")
        return self


def main(cfg: ScoreConfig) -> None:
    from hpcai import dist

    with dist.start(cfg.mesh) as mesh:
        metrics = score(cfg, mesh)
        if mesh.is_first:
            for name, value in metrics.items():
                print(f"{name:15}{value:,}" if isinstance(value, int) else f"{name:15}{value:.6g}", flush=True)


run = partial(run_command, ScoreConfig, main)


def score(cfg: ScoreConfig, mesh: Any) -> dict[str, float]:
    """Return all metrics, equal on all ranks."""
    from hpcai.dist.collectives import broadcast_object

    tasks = None if cfg.tasks is None else broadcast_object(read_tasks(cfg.tasks) if mesh.is_first else [], mesh.peers)
    model, pipeline = load_model(cfg, mesh)
    metrics = {} if cfg.data is None else score_rows(cfg, mesh, model, pipeline)
    return metrics if tasks is None else metrics | score_tasks(cfg, mesh, model, pipeline, tasks)


# ---- rows of text


def score_rows(cfg: ScoreConfig, mesh: Any, model: Any, pipeline: Any) -> dict[str, float]:
    import numpy as np
    import torch

    from hpcai.data.collate import tree_zip
    from hpcai.dist.collectives import all_reduce_
    from hpcai.models import llm

    texts, replicas = open_rows(cfg, model), mesh["replicate"]
    sums = torch.zeros(4, dtype=torch.float64, device=mesh.device)
    indices = range(replicas.rank, len(texts), replicas.size)
    with torch.no_grad():
        for at in range(0, len(indices), cfg.batch):
            samples = [texts.sample(number, 0) for number in indices[at : at + cfg.batch]]
            batch = tree_zip(samples, lambda values: torch.from_numpy(np.stack(values)).to(mesh.device))
            values = llm.score(model, batch) if pipeline is None else pipeline.forward(llm.score, batch, torch.no_grad)
            if values is not None and mesh["tensor"].rank == mesh["context"].rank == 0:
                pair = (*values["loss"], *values.get("bits_per_byte", (0.0, 0.0)))
                sums += torch.stack([torch.as_tensor(x, dtype=torch.float64, device=mesh.device) for x in pair])
    nats, tokens, bits, of_bytes = all_reduce_(sums, mesh.peers).tolist()
    if not tokens:
        raise DataError(f"{cfg.data}: no token of its validation rows is scored; set judge to all")
    loss = nats / tokens
    per_byte = {"bits_per_byte": bits / of_bytes} if of_bytes else {}
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), **per_byte, "tokens": int(tokens), "rows": len(texts)}


def open_rows(cfg: ScoreConfig, model: Any) -> Any:
    """Return the validation rows of a folder as samples. Raises DataError if the folder has none, ConfigError if it has another
    tokenizer than the model, rows too long for it, or no answers although ``judge`` is answers."""
    from apps.llm.data import Texts, read_metadata
    from hpcai.data import Rows
    from hpcai.models.llm.text import has_tokenizer

    assert cfg.data is not None
    info = read_metadata(cfg.data)
    if cfg.judge == "answers" and not info.answers:
        raise ConfigError(f"{cfg.data}: its rows have no answers, but judge is answers; set it to all")
    if info.sequence > model.cfg.positions or info.vocabulary > model.cfg.vocabulary:
        description = f"rows of {info.sequence} tokens of {info.vocabulary}, the model has {model.cfg.positions} positions"
        raise ConfigError(f"{cfg.data}: {description} and a vocabulary of {model.cfg.vocabulary}; convert other rows")
    if has_tokenizer(model) and (own := model.tokenizer.identity) != info.tokenizer:
        description = f"rows of the tokenizer {info.tokenizer[:12]}, the model has {own[:12]}"
        raise ConfigError(f"{cfg.data}: {description}; convert rows with that one")
    remedy = f"make rows with: {command_of('data_prep.text')} convert SOURCE {cfg.data} --tokenizer FILE"
    return Texts(Rows(cfg.data / "validation", info.fields, remedy, reader="buffered"), info, cfg.documents, cfg.judge, cfg.rows)


# ---- questions


class Task(NamedTuple):
    line: int
    context: str
    choices: list[str]
    answer: int


def read_tasks(path: Path) -> list[Task]:
    """Read questions with choices. Raises DataError with the number of a line that is none."""
    tasks = []
    for number, line in read_json_lines(path, EXPECTED):
        context, answer, choices = line.get("context"), line.get("answer"), line.get("choices")
        choices = choices if isinstance(choices, list) and all(isinstance(each, str) and each for each in choices) else []
        if not isinstance(context, str) or len(choices) < 2 or type(answer) is not int or not 0 <= answer < len(choices):
            raise DataError(f"{path}: line {number}: no question, expected {EXPECTED}, with 0 <= answer < choices")
        tasks.append(Task(number, context, choices, answer))
    if not tasks:
        raise DataError(f"{path}: has no question, expected lines such as {EXPECTED}")
    return tasks


def score_tasks(cfg: ScoreConfig, mesh: Any, model: Any, pipeline: Any, tasks: Sequence[Task]) -> dict[str, float]:
    import numpy as np

    from hpcai.dist.collectives import all_gather_object
    from hpcai.models.llm import log_likelihoods

    replicas = mesh["replicate"]
    local_tasks = tasks[replicas.rank :: replicas.size]
    pairs = [encode_choice(model, task, choice, cfg.tasks) for task in local_tasks for choice in task.choices]
    values = iter(log_likelihoods(model, pairs, cfg.batch, pipeline)) if pairs else iter([])
    correct = [0, 0]
    for task in local_tasks:
        likely = np.array([next(values) for _ in task.choices])
        widths = [len(choice.encode()) for choice in task.choices]
        correct[0] += int(likely.argmax()) == task.answer
        correct[1] += int((likely / widths).argmax()) == task.answer
    gathered = all_gather_object(correct if mesh.model_parallel.rank == 0 else [0, 0], mesh.peers)
    plain, by_length = (sum(each[n] for each in gathered) / len(tasks) for n in (0, 1))
    return {"accuracy": plain, "accuracy_norm": by_length, "questions": len(tasks)}


def encode_choice(model: Any, task: Task, choice: str, path: Path | None) -> tuple[list[int], list[int]]:
    """Return the tokens of a context, and those that a choice adds to it. White space at the end of a context is encoded with the
    choice, since tokenizers join them. A context that is too long is truncated from its beginning."""
    from hpcai.models.llm.text import start_tokens

    tokenizer, context = model.tokenizer, task.context.rstrip()
    choice = task.context[len(context) :] + choice
    first, tokens = tokenizer.encode(context), tokenizer.encode(context + choice)
    second = tokens[len(first) :] or tokenizer.encode(choice)
    prompt, limit = [*start_tokens(tokenizer), *tokens[: len(first)]], model.cfg.positions + 1 - len(second)
    if limit < 1:
        description = f"a choice of {len(second)} tokens, the model has {model.cfg.positions} positions"
        raise DataError(f"{path}: line {task.line}: {description}; shorten it")
    return prompt[-limit:], second
