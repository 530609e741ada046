"""Evaluate a model on public benchmarks:  python -m apps.llm evaluate weights=FOLDER tasks=arc_easy,hellaswag [limit=100 ...]

Tasks are those of EleutherAI's lm-evaluation-harness, which downloads their data. Documents are distributed over model replicas
(``mesh.replicate``).
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import field_validator

from apps.llm.prompting import PromptingConfig, load_model, run_command
from hpcai.config import NonNegativeInt, PositiveInt
from hpcai.errors import ConfigError
from hpcai.lazy import import_optional


class EvaluateConfig(PromptingConfig):
    """Tasks of the harness, and their settings there."""

    tasks: tuple[str, ...]
    """names of tasks, groups and tags, also as patterns: arc_easy,mmlu_*"""
    include_path: Path | None = None
    """folder of further tasks, as YAML files"""
    batch: PositiveInt = 8
    """texts in a batch of a model replica"""
    num_fewshot: NonNegativeInt | None = None
    """examples in each context; null: as the task has it"""
    limit: PositiveInt | None = None
    """number of documents of each task, from the first; null: all"""
    apply_chat_template: bool = False
    """contexts are messages of a chat, with the template of the tokenizer"""
    gen_kwargs: dict[str, Any] = {}
    """replace settings of generation of the tasks: {max_gen_toks: 64}"""
    out: Path | None = None
    """JSON file of all results, with the answer to each document"""

    @field_validator("tasks", mode="before")
    @classmethod
    def _split(cls, tasks: Any) -> Any:
        names = tasks.split(",") if isinstance(tasks, str) else tasks
        return tuple(names) if isinstance(names, list) else names


def main(cfg: EvaluateConfig) -> None:
    from hpcai import dist

    evaluator, tasks, utils = (import_optional(f"lm_eval.{name}", "evaluation tasks need", "lm-eval")
                               for name in ("evaluator", "tasks", "utils"))  # fmt: skip
    os.environ["DISABLE_MULTIPROC"] = "1"  # the signals of a forked pool would arrive here, and end the run
    with dist.start(cfg.mesh) as mesh:
        from hpcai.models.llm.harness import HarnessLM

        manager = tasks.TaskManager(include_path=cfg.include_path and str(cfg.include_path))
        names = {name: manager.match_tasks([name]) for name in cfg.tasks}
        if missing := [name for name in cfg.tasks if not names[name]]:
            raise ConfigError(f"tasks: the harness has no {', '.join(missing)}; python -m lm_eval ls tasks prints their names")
        model, pipeline = load_model(cfg, mesh)
        results = evaluator.simple_evaluate(
            model=HarnessLM(model, mesh, pipeline, cfg.batch), tasks=[task for matches in names.values() for task in matches],
            num_fewshot=cfg.num_fewshot, limit=cfg.limit, apply_chat_template=cfg.apply_chat_template, gen_kwargs=cfg.gen_kwargs,
            task_manager=manager, log_samples=cfg.out is not None, bootstrap_iters=1000,
        )  # fmt: skip
        if mesh.is_first:
            print(*(utils.make_table(results, kind) for kind in ("results", "groups") if results.get(kind)), sep="\n", flush=True)
        if mesh.is_first and cfg.out is not None:
            cfg.out.parent.mkdir(parents=True, exist_ok=True)
            cfg.out.write_text(json.dumps(results, indent=1, default=utils.handle_non_serializable, ensure_ascii=False), "utf-8")


run = partial(run_command, EvaluateConfig, main)
