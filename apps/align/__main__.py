"""Align a language model:  python -m apps.align apps/align/configs/small.yaml [method=rloo step.lr=1e-6 ...]"""

import shutil
import time
from functools import partial

from apps.align.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.align.build import build_data, build_step, complete_settings
    from apps.align.texts import save_answers
    from hpcai import dist, train
    from hpcai.models.llm.tokenizer import tokenizer_files

    cfg = complete_settings(cfg)
    with dist.start(cfg.mesh) as mesh, train.Run("align", cfg, mesh) as run:
        step = build_step(cfg, mesh)
        data, validation, metric, held_out = build_data(cfg, step, run)
        if metric is not None and not (run.checkpoints and dist.broadcast_object(run.checkpoints.paths(), mesh.peers)):
            began, values = time.perf_counter(), train.evaluate(step, metric, validation)  # before training
            run.reports.emit("evaluate", step=0, epoch=0.0, samples=0, **values, seconds=time.perf_counter() - began)
        result = train.fit(step, data, cfg.train, validation=validation, evaluate=metric, run=run)
        if result.reason != "signal":
            for name, file in tokenizer_files(cfg.start.tokenizer or cfg.start.weights).items():
                run.write_file(name, partial(shutil.copyfile, file))
        run.finish(step, result)
        if result.reason != "signal" and held_out is not None:
            save_answers(run, cfg, held_out)
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
