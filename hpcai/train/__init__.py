"""The training loop and its parts."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".step": ["Step", "MicroBatches"],
        ".loop": ["fit"],
        ".run": ["Result", "Run"],
        ".throughput": ["SampleCost"],
        ".checkpoint": ["Checkpoints"],
        ".rng": ["seed_all", "seeds"],
        ".evaluation": ["evaluate", "predict"],
        ".metrics": ["PerSample"],
        "hpcai.stop": ["REQUEUE"],
        "hpcai.settings": ["StepConfig", "ScheduleConfig", "TrainConfig", "CheckpointConfig", "ReportConfig"],
    },
)
