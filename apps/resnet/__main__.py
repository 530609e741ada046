"""Train ResNet:  python -m apps.resnet apps/resnet/configs/small.yaml [step.lr=2e-3 ...]"""

from apps.resnet.mlperf import BENCHMARK
from apps.resnet.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.resnet.data import build_loaders
    from hpcai import dist, train
    from hpcai.models import resnet

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("resnet", cfg, mesh, BENCHMARK) as run,
        build_loaders(cfg, mesh) as (training, validation, pictures, model_cfg),
    ):
        with train.seeds(cfg.train.seed):
            model = resnet.parallelize(resnet.ResNet(model_cfg), mesh, cfg.batchnorm_group)
        step = train.Step(model, resnet.loss, cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=resnet.score, run=run)
        run.finish(step, result, resnet.predictions, pictures, run.array_writer("classes.npz", classes=model_cfg.names))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
