"""Train DimeNet++:  python -m apps.opencatalyst apps/opencatalyst/configs/small.yaml [step.lr=2e-3 ...]"""

from functools import partial

from apps.opencatalyst.mlperf import BENCHMARK
from apps.opencatalyst.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.opencatalyst.data import build_loaders
    from hpcai import dist, train
    from hpcai.models import dimenet

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("opencatalyst", cfg, mesh, BENCHMARK) as run,
        build_loaders(cfg, mesh) as (training, validation, pictures, shape),
    ):
        with train.seeds(cfg.train.seed):
            model = dimenet.parallelize(dimenet.DimeNet(shape), mesh)
        step = train.Step(model, partial(dimenet.loss, cfg=cfg.objective), cfg.step, mesh, counts=dimenet.counted)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=dimenet.score, run=run)
        run.finish(step, result, dimenet.pairs, pictures, run.array_writer("pairs.npz"))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
