"""Train DeepCAM:  python -m apps.deepcam apps/deepcam/configs/small.yaml [step.lr=2e-3 ...]"""

from apps.deepcam.mlperf import BENCHMARK
from apps.deepcam.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.deepcam.data import build_loaders
    from hpcai import dist, train
    from hpcai.models import deepcam

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("deepcam", cfg, mesh, BENCHMARK) as run,
        build_loaders(cfg, mesh) as (training, validation, pictures, shape, size),
    ):
        with train.seeds(cfg.train.seed):
            model = deepcam.parallelize(deepcam.DeepCam(shape), mesh, cfg.batchnorm_group, size)
        step = train.Step(model, deepcam.loss, cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=deepcam.score, run=run)
        names = {"variables": shape.variables, "units": shape.units, "classes": shape.classes}
        run.finish(step, result, deepcam.maps, pictures, run.array_writer("maps.npz", **names))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
