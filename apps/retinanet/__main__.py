"""Train RetinaNet:  python -m apps.retinanet apps/retinanet/configs/small.yaml [step.lr=2e-3 ...]"""

from apps.retinanet.mlperf import BENCHMARK
from apps.retinanet.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.retinanet.data import build_loaders
    from hpcai import dist, train
    from hpcai.models import retinanet

    truth = cfg.data.directory / "validation" / "annotations.json"
    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("retinanet", cfg, mesh, BENCHMARK) as run,
        build_loaders(cfg, mesh) as (training, validation, pictures, model_cfg),
        retinanet.Scoring(truth, cfg.scoring_cores, mesh) as score,
    ):
        with train.seeds(cfg.train.seed):
            model = retinanet.RetinaNet(model_cfg)
            if cfg.backbone is not None:
                retinanet.load_backbone(model, cfg.backbone)
            model = retinanet.parallelize(model, mesh, cfg.batchnorm_group)
        step = train.Step(model, retinanet.loss, cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=score, run=run)
        run.finish(step, result, retinanet.objects, pictures, run.array_writer("objects.npz", classes=model_cfg.names))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
