"""Pre-train BERT:  python -m apps.bert apps/bert/configs/small.yaml [step.lr=2e-3 ...]"""

from apps.bert.mlperf import BENCHMARK
from apps.bert.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.bert.data import build_loaders, build_model
    from hpcai import dist, train
    from hpcai.models import bert

    with (
        dist.start(cfg.mesh) as mesh,
        train.Run("bert", cfg, mesh, BENCHMARK) as run,
        build_loaders(cfg, mesh) as (training, validation, families, contacts),
    ):
        with train.seeds(cfg.train.seed):
            model = bert.parallelize(build_model(cfg), mesh)
        step = train.Step(model, bert.loss, cfg.step, mesh, counts=bert.counted)
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=bert.score, run=run)
        run.finish(step, result, bert.attention_maps, families, run.array_writer("contacts.npz", **contacts))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
