"""Train a diffusion model:  python -m apps.diffusion apps/diffusion/configs/small.yaml [step.lr=2e-3 ...]

The same line runs alone, or behind mpiexec, srun or torchrun.
"""

from functools import partial

from apps.diffusion.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.diffusion.data import network, samples, write_ensembles
    from hpcai import dist, train
    from hpcai.models import diffusion

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("diffusion", cfg, mesh) as run,
        samples(cfg, mesh) as (training, validation, drawn, shape),
    ):
        with train.seeds(cfg.train.seed):
            model = network(cfg, shape, mesh)
        step = train.Step(model, diffusion.loss, cfg.step, mesh)
        evaluate = partial(diffusion.measure, members=cfg.data.scored) if cfg.data.scored else diffusion.score
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=evaluate, run=run)
        members = partial(diffusion.ensemble, members=cfg.data.members)
        run.finish(step, result, members, drawn, run.writer("ensembles.npz", write_ensembles, shape))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
