"""Train the 3D U-Net:  python -m apps.unet3d apps/unet3d/configs/small.yaml [step.lr=0.2 ...]"""

from apps.unet3d.mlperf import BENCHMARK
from apps.unet3d.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.unet3d.data import build_loaders
    from hpcai import dist, train
    from hpcai.models import unet3d

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("unet3d", cfg, mesh, BENCHMARK) as run,
        build_loaders(cfg, mesh) as (training, validation, pictures),
    ):
        with train.seeds(cfg.train.seed):
            model = unet3d.parallelize(unet3d.UNet3D(cfg.model), mesh, cfg.data.window_group)
        step = train.Step(model, unet3d.loss, cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=unet3d.score, run=run)
        about = {"variables": ["CT"], "units": ["HU"], "classes": cfg.model.classes, "spacing_mm": cfg.model.spacing_mm[1:]}
        run.finish(step, result, unet3d.slices, pictures, run.array_writer("maps.npz", **about))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
