"""Train OpenFold:  python -m apps.openfold apps/openfold/configs/small.yaml [step.lr=2e-3 ...]

The same line runs alone, or behind mpiexec, srun or torchrun.
"""

from functools import partial

from apps.openfold.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.openfold.data import chains, keep_structures, network
    from hpcai import dist, train
    from hpcai.models import openfold

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("openfold", cfg, mesh) as run,
        chains(cfg, mesh) as (training, validation, pictures),
    ):
        train.seed_all(cfg.train.seed)  # the same weights everywhere,
        model = openfold.parallelize(network(cfg), mesh)
        train.seed_all(cfg.train.seed + mesh["replicate"].rank)  # and dropout of its own on each copy
        step = train.Step(model, partial(openfold.loss, cfg=cfg.objective), cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=openfold.score, run=run)
        if result.reason != "signal":
            weights = step.snapshot()
            run.keep("model.safetensors", lambda path: model.save(path, weights))
            if pictures is not None:
                keep_structures(run, train.predict(step, openfold.structures_of, pictures), cfg.data)
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
