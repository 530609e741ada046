"""Train a language model:  python -m apps.llm apps/llm/configs/small.yaml [step.lr=2e-3 ...]
Generate texts:         python -m apps.llm generate weights=FOLDER prompt="..." [temperature=0.8 ...]
Chat at a terminal:     python -m apps.llm chat weights=FOLDER [system="..." temperature=0.7 ...]
Evaluate a model:       python -m apps.llm score weights=FOLDER data=FOLDER|tasks=FILE.jsonl
Run its benchmarks:     python -m apps.llm evaluate weights=FOLDER tasks=arc_easy,hellaswag
"""

from functools import partial

from apps.llm import memory
from apps.llm.mlperf import BENCHMARKS
from apps.llm.settings import Config
from hpcai import config


class Run(Config):
    __doc__ = Config.__doc__

    def notes(self) -> list[str]:
        return memory.describe(self)


def main(cfg: Config) -> None:
    from apps.llm.data import build_loaders, build_model, complete_settings
    from apps.llm.routers import RouterWatch
    from apps.llm.texts import save_texts, save_tokenizer
    from hpcai import dist, train
    from hpcai.models import llm

    cfg = complete_settings(cfg)
    with dist.start(cfg.mesh) as mesh:
        memory.check_memory(cfg, mesh)
        benchmark, tokens = BENCHMARKS.get(cfg.benchmark or ""), memory.row_tokens(cfg)
        cost = train.SampleCost({"tokens": tokens}, tokens * memory.flops_per_token(cfg, tokens, False), memory.CONVENTION)
        with train.Run("llm", cfg, mesh, benchmark, cost) as run, build_loaders(cfg, mesh) as (training, validation, pictures):
            with train.seeds(cfg.train.seed):
                model = build_model(cfg, mesh)
            if model.cfg.experts is not None and mesh.is_first:
                run.reports.sinks += (RouterWatch(run.reports, model.cfg.experts),)
            step = train.Step(model, llm.loss, cfg.step, mesh, pipeline=llm.build_pipeline(model, mesh, **cfg.stages.model_dump()))
            metric = llm.score if validation is not None else None
            result = train.fit(step, training, cfg.train, validation=validation, evaluate=metric, run=run)
            if result.reason != "signal":
                save_tokenizer(run, cfg, model)
            run.finish(step, result, llm.entropies, pictures, partial(save_texts, run, cfg, step))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Run, main, generate="apps.llm.generate", chat="apps.llm.chat", score="apps.llm.score", evaluate="apps.llm.evaluate")
