"""A model that is cut over processes, where each of them has all tokens of a few texts: what generation and scores ask of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hpcai.errors import ConfigError
from hpcai.models.llm.model import LLM, Attention, CausalAttention
from hpcai.nn.seam import Seam
from hpcai.parallel.pipeline import Pipeline
from hpcai.parallel.stages import Passed
from hpcai.parallel.tensor import parts_with_tokens

Override = tuple[Any, str, Any]  # an object, one of its attributes, and another value of that


def gather_overrides(model: LLM, pipeline: Pipeline | None = None) -> list[Override]:
    """What lets each rank of ``tensor`` and ``context`` have all tokens of its texts, however few, where no gradients are wanted:
    with ``context``, along which weights are whole, all ranks do the same."""
    seen = [model] + ([pipeline.stages.module(stage) for stage in pipeline.stages.own] if pipeline is not None else [])
    changes: list[Override] = [(part, "sequence", None) for part in parts_with_tokens(model)]
    changes += [(each, "local_tokens", Seam()) for each in seen]
    return changes + [(attention, "core_attention", CausalAttention()) for attention in local_attentions(model)]


@contextmanager
def override_attributes(overrides: list[Override]) -> Iterator[None]:
    """Inside, attributes have other values."""
    kept = [getattr(one, name) for one, name, _ in overrides]
    try:
        for one, name, value in overrides:
            _set_attribute(one, name, value)
        yield
    finally:
        for (one, name, _), value in zip(reversed(overrides), reversed(kept)):
            _set_attribute(one, name, value)


def _set_attribute(one: Any, name: str, value: Any) -> None:
    """As ``setattr``, in a tenth of the time for a part of a module: it is done for each token."""
    if isinstance(one, nn.Module) and name in one._modules:
        one._modules[name] = value
    else:
        setattr(one, name, value)


def local_attentions(model: LLM) -> list[Attention]:
    """Of the layers that this process has."""
    layers: Any = model.model.layers
    return [layer.self_attn for layer in layers if not isinstance(layer, Passed)]


def active_pipeline(model: LLM, pipeline: Any) -> Pipeline | None:
    """``act`` where a model is cut into stages, else None. Raises ConfigError where such a model comes without."""
    if isinstance(pipeline, Pipeline) and pipeline.axis.size > 1:
        return pipeline
    if any(isinstance(part, Passed) for part in model.modules()):
        raise ConfigError("the model is cut into stages, and this process has one of them; give pipeline=build_pipeline(model, mesh)")
    return None
