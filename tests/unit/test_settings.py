"""Inconsistent shared settings are an error, with a suggestion."""

from typing import Any

import pytest
from pydantic import ValidationError

from hpcai.config import Settings
from hpcai.settings import LoaderConfig, ScheduleConfig, StepConfig, TrainConfig


@pytest.mark.parametrize(
    "kind, kwargs, text",
    [
        (StepConfig, {"precision": "fp64", "moments": "bf16"}, "moments bf16 with precision fp64"),
        (StepConfig, {"capture": "whole", "shard": "weights"}, "capture whole with shard weights is not supported"),
        (StepConfig, {"shard_within": 2}, "shard_within is 2, but nothing is sharded"),
        (StepConfig, {"clip_per": "sample", "clip": 0.1, "shard": "weights"}, "clip_per is sample, but shard is weights"),
        (LoaderConfig, {"once": True, "reader": "gds"}, "reader gds gives samples on the GPU of each process; set once to auto"),
        (ScheduleConfig, {"decay": "steps", "decay_at": (3.0, 1.0), "decay_to": (0.5, 0.1)}, "must rise"),
        (TrainConfig, {"metric": "x", "better": "higher", "hopeless": 0.9, "target": 0.5}, "hopeless 0.9 is better than"),
    ],
)
def test_inconsistent_settings_are_an_error(kind: type[Settings], kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        kind(**kwargs)


def test_samples_read_by_gds_are_not_sent() -> None:
    assert [LoaderConfig(**cfg).loader_kwargs()["once"] for cfg in ({}, {"once": True}, {"reader": "gds"})] == ["auto", True, False]
