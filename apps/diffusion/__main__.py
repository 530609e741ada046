"""Train a diffusion model:  python -m apps.diffusion apps/diffusion/configs/small.yaml [step.lr=2e-3 ...]
Evaluate its images:     python -m apps.diffusion score weights=FOLDER captions=FILE model=FOLDER clip=FOLDER ...

The same commands run on one rank, or on many behind mpiexec, srun or torchrun.
"""

from functools import partial

from apps.diffusion.mlperf import BENCHMARKS
from apps.diffusion.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.diffusion.data import build_loaders, build_model, write_ensembles
    from hpcai import dist, train
    from hpcai.models import diffusion

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("diffusion", cfg, mesh, BENCHMARKS.get(cfg.benchmark or "")) as run,
        build_loaders(cfg, mesh) as (training, validation, drawn, shape),
    ):
        with train.seeds(cfg.train.seed):
            model = build_model(cfg, shape, mesh)
        step = train.Step(model, diffusion.loss, cfg.step, mesh)
        metric = partial(diffusion.ensemble_scores, members=cfg.data.scored) if cfg.data.scored else diffusion.score
        metric = partial(metric, offset=cfg.data.evaluation_place)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=metric, run=run)
        members = partial(diffusion.draw_ensemble, members=cfg.data.members)
        run.finish(step, result, members, drawn, run.file_writer("ensembles.npz", write_ensembles, shape, cfg.data.directory))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main, score="apps.diffusion.score")
