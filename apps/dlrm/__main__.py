"""Train DLRM:  python -m apps.dlrm apps/dlrm/configs/small.yaml [step.lr=1e-2 ...]"""

from apps.dlrm.mlperf import BENCHMARK
from apps.dlrm.settings import Config
from hpcai import config


def main(cfg: Config) -> None:
    from apps.dlrm import data
    from hpcai import dist, train
    from hpcai.models import dlrm

    cost = train.SampleCost({"events": cfg.data.rows})
    with dist.start(cfg.mesh) as mesh, train.Run("dlrm", cfg, mesh, BENCHMARK, cost) as run:
        table = data.open_table(cfg)
        model_cfg = data.complete_model_config(cfg.model, table)
        plan = data.plan_tables(cfg, model_cfg, mesh)
        with train.seeds(cfg.train.seed):
            model = dlrm.parallelize(dlrm.DLRM(model_cfg), mesh, plan)
        with data.build_loaders(cfg, mesh, table, model) as (training, validation, pictures):
            step = train.Step(model, dlrm.loss, cfg.step, mesh)
            step.messages.append(data.describe_plan(plan, cfg.data.batch))
            result = train.fit(step, training, cfg.train, validation=validation, evaluate=data.score, run=run)
            run.finish(step, result, data.numbered_predictions, pictures, run.array_writer("events.npz", **table.truth()))
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    config.run(Config, main)
