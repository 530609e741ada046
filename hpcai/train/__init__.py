"""The one training loop and its parts."""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "Step": ".step",
        "MicroBatches": ".step",
        "fit": ".loop",
        "Result": ".loop",
        "REQUEUE": "hpcai.stop",
        "Run": ".run",
        "Checkpoints": ".checkpoint",
        "seed_all": ".rng",
        "seeds": ".rng",
        "evaluate": ".evaluation",
        "predict": ".evaluation",
        "StepConfig": "hpcai.settings",
        "ScheduleConfig": "hpcai.settings",
        "TrainConfig": "hpcai.settings",
        "CheckpointConfig": "hpcai.settings",
        "ReportConfig": "hpcai.settings",
    },
)
