"""Train CosmoFlow:  python -m apps.cosmoflow apps/cosmoflow/configs/small.yaml [step.lr=2e-3 ...]

The same line runs alone, or behind mpiexec, srun or torchrun.
"""

from apps.cosmoflow.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.cosmoflow.data import universes, write_pairs
    from hpcai import dist, train
    from hpcai.models import cosmoflow

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("cosmoflow", cfg, mesh) as run,
        universes(cfg, mesh) as (training, validation, shape),
    ):
        train.seed_all(cfg.train.seed)  # the same weights everywhere,
        model = cosmoflow.parallelize(cosmoflow.CosmoFlow(shape), mesh)
        train.seed_all(cfg.train.seed + mesh.rank)  # and dropout of its own on each process
        step = train.Step(model, cosmoflow.loss, cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=cosmoflow.error, run=run)
        if result.reason != "signal":
            pairs = train.predict(step, cosmoflow.pairs, validation)
            weights = step.snapshot()
            run.keep("model.safetensors", lambda path: model.save(path, weights))
            run.keep("predictions.npz", lambda path: write_pairs(path, pairs, shape))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
