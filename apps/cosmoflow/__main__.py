"""Train CosmoFlow:  python -m apps.cosmoflow apps/cosmoflow/configs/small.yaml [step.lr=2e-3 ...]"""

from apps.cosmoflow.mlperf import BENCHMARK
from apps.cosmoflow.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.cosmoflow.data import build_loaders, write_pairs
    from hpcai import dist, train
    from hpcai.models import cosmoflow

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("cosmoflow", cfg, mesh, BENCHMARK) as run,
        build_loaders(cfg, mesh) as (training, validation, shape),
    ):
        with train.seeds(cfg.train.seed):
            model = cosmoflow.parallelize(cosmoflow.CosmoFlow(shape), mesh)
        step = train.Step(model, cosmoflow.loss, cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=cosmoflow.error, run=run)
        run.finish(step, result, cosmoflow.pairs, validation, run.file_writer("predictions.npz", write_pairs, shape))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
