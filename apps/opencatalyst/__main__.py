"""Train DimeNet++:  python -m apps.opencatalyst apps/opencatalyst/configs/small.yaml [step.lr=2e-3 ...]

The same line runs alone, or behind mpiexec, srun or torchrun.
"""

from functools import partial

from apps.opencatalyst.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.opencatalyst.data import frames, write_pairs
    from hpcai import dist, train
    from hpcai.models import dimenet

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("opencatalyst", cfg, mesh) as run,
        frames(cfg, mesh) as (training, validation, pictures, shape),
    ):
        train.seed_all(cfg.train.seed)  # the same weights everywhere
        model = dimenet.parallelize(dimenet.DimeNet(shape), mesh)
        step = train.Step(model, partial(dimenet.loss, cfg=cfg.objective), cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=dimenet.score, run=run)
        if result.reason != "signal":
            weights = step.snapshot()
            run.keep("model.safetensors", lambda path: model.save(path, weights))
            if pictures is not None:
                pairs = train.predict(step, dimenet.pairs, pictures)
                run.keep("pairs.npz", lambda path: write_pairs(path, pairs))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
