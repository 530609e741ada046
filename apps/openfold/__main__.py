"""Train OpenFold:  python -m apps.openfold apps/openfold/configs/small.yaml [step.lr=2e-3 ...]
Predict:         python -m apps.openfold fold CHAINS.fasta [ALIGNMENTS] weights=FILE [mesh.axial=8 ...]
"""

from functools import partial

from apps.openfold.mlperf import BENCHMARK
from apps.openfold.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.openfold.data import build_loaders, build_model, save_structures
    from hpcai import dist, train
    from hpcai.models import openfold

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("openfold", cfg, mesh, BENCHMARK) as run,
        build_loaders(cfg, mesh) as (training, validation, pictures),
    ):
        with train.seeds(cfg.train.seed):
            model = openfold.parallelize(build_model(cfg), mesh)
        step = train.Step(model, partial(openfold.loss, cfg=cfg.objective), cfg.step, mesh)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=openfold.score, run=run)
        run.finish(step, result, openfold.predict_structures, pictures, partial(save_structures, run, cfg.data))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main, fold="apps.openfold.fold")
