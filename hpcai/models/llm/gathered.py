"""Run a sharded language model with all tokens of a text on every rank, as generation and scoring do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from hpcai.errors import ConfigError
from hpcai.models.llm.model import LLM, Attention, CausalAttention
from hpcai.nn.seam import Seam
from hpcai.parallel.pipeline import Pipeline
from hpcai.parallel.pipeline_stages import StageOutput
from hpcai.parallel.tensor import sequence_parallel

Override = tuple[Any, str, Any]  # object, name of an attribute, temporary value


def gather_overrides(model: LLM, pipeline: Pipeline | None = None) -> list[Override]:
    """Return the overrides that turn sequence and context parallelism off: each rank of ``tensor`` and ``context`` then computes
    all tokens of its texts, however few. For inference only. Ranks of ``context``, which have full weights, compute the same."""
    modules = local_modules(model, pipeline)
    overrides: list[Override] = [(part, "sequence", None) for part in sequence_parallel(model)]
    overrides += [(module, "local_tokens", Seam()) for module in modules]
    return overrides + [(attention, "core_attention", local_attention(attention)) for attention in local_attentions(model)]


def local_modules(model: LLM, pipeline: Pipeline | None) -> list[Any]:
    """Return the model, and the pipeline stages of this rank."""
    return [model] + ([pipeline.stages.module(stage) for stage in pipeline.stages.local_stages] if pipeline is not None else [])


@contextmanager
def override_attributes(overrides: list[Override]) -> Iterator[None]:
    """Context manager: set attributes, and restore their values afterwards."""
    saved = [getattr(owner, name) for owner, name, _ in overrides]
    try:
        for owner, name, value in overrides:
            _set_attribute(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(reversed(overrides), reversed(saved)):
            _set_attribute(owner, name, value)


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    """Like ``setattr``, but a tenth of its time for a submodule or parameter: it is called for each token."""
    if isinstance(owner, nn.Module) and name in owner._modules:
        owner._modules[name] = value
    elif isinstance(owner, nn.Module) and name in owner._parameters:
        owner._parameters[name] = value
    else:
        setattr(owner, name, value)


def local_attentions(model: LLM) -> list[Attention]:
    """Return the attention modules of the layers on this rank."""
    layers: Any = model.model.layers
    return [layer.self_attn for layer in layers if not isinstance(layer, StageOutput)]


def local_attention(attention: Attention) -> CausalAttention:
    """Return the core attention of a rank that has all tokens."""
    core: Any = attention.core_attention
    return cast(CausalAttention, getattr(core, "local_attention", core))


def active_pipeline(model: LLM, pipeline: Any) -> Pipeline | None:
    """Return ``pipeline`` if it has several stages, otherwise None. Raises ConfigError for a stage of a model without it."""
    if isinstance(pipeline, Pipeline) and pipeline.axis.size > 1:
        return pipeline
    if any(isinstance(part, StageOutput) for part in model.modules()):
        raise ConfigError("the model is one stage of a pipeline; expected pipeline=build_pipeline(model, mesh)")
    return None
