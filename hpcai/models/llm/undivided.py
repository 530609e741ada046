"""A model that is cut over processes, where each of them has all tokens of a few texts: what generation and scores ask of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hpcai.errors import ConfigError
from hpcai.models.llm.model import LLM, Attention, Causal
from hpcai.nn.seam import Seam
from hpcai.parallel.pipeline import Pipeline
from hpcai.parallel.pipeline_stages import StageOutput
from hpcai.parallel.tensor import sequence_parallel

Change = tuple[Any, str, Any]  # an object, one of its attributes, and another value of that


def undivided(model: LLM, act: Pipeline | None = None) -> list[Change]:
    """What lets each rank of ``tensor`` and ``context`` have all tokens of its texts, however few, where no gradients are wanted:
    with ``context``, along which weights are whole, all ranks do the same."""
    seen = [model] + ([act.stages.module(stage) for stage in act.stages.local_stages] if act is not None else [])
    changes: list[Change] = [(part, "sequence", None) for part in sequence_parallel(model)]
    changes += [(each, "own", Seam()) for each in seen]
    return changes + [(attention, "attend", Causal()) for attention in attentions(model)]


@contextmanager
def holding(changes: list[Change]) -> Iterator[None]:
    """Inside, attributes have other values."""
    kept = [getattr(one, name) for one, name, _ in changes]
    try:
        for one, name, value in changes:
            _set(one, name, value)
        yield
    finally:
        for (one, name, _), value in zip(reversed(changes), reversed(kept)):
            _set(one, name, value)


def _set(one: Any, name: str, value: Any) -> None:
    """As ``setattr``, in a tenth of the time for a part of a module: it is done for each token."""
    if isinstance(one, nn.Module) and name in one._modules:
        one._modules[name] = value
    else:
        setattr(one, name, value)


def attentions(model: LLM) -> list[Attention]:
    """Of the layers that this process has."""
    layers: Any = model.model.layers
    return [layer.self_attn for layer in layers if not isinstance(layer, StageOutput)]


def last_stage(model: LLM, act: Any) -> Pipeline | None:
    """``act`` where a model is cut into stages, else None. Raises ConfigError where such a model comes without."""
    if isinstance(act, Pipeline) and act.axis.size > 1:
        return act
    if any(isinstance(part, StageOutput) for part in model.modules()):
        raise ConfigError("the model is cut into stages, and this process has one of them; give act=stages(model, mesh)")
    return None
