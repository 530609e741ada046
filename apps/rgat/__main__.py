"""Train R-GAT:  python -m apps.rgat apps/rgat/configs/small.yaml [step.lr=2e-3 ...]"""

from apps.rgat.mlperf import BENCHMARK
from apps.rgat.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.rgat.data import build_loaders
    from hpcai import dist, train
    from hpcai.models import rgat

    cost = train.SampleCost({"papers": cfg.data.papers})
    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("rgat", cfg, mesh, BENCHMARK, cost) as run,
        build_loaders(cfg, mesh) as (training, validation, pictures, model_cfg, truth),
    ):
        with train.seeds(cfg.train.seed):
            model = rgat.parallelize(rgat.RGAT(model_cfg), mesh)
        step = train.Step(model, rgat.loss, cfg.step, mesh, counts=rgat.counted)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=rgat.score, run=run)
        run.finish(step, result, rgat.predictions, pictures, run.array_writer("papers.npz", classes=model_cfg.names, **truth))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
