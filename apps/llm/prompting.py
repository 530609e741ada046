"""Trained models for generation and scoring on a mesh."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from hpcai import config
from hpcai.config import Settings
from hpcai.models.llm import AxesConfig, SamplingConfig


class PromptingConfig(Settings):
    """A trained model and the mesh that it runs on."""

    weights: Path = Path("runs/llm")
    """folder in Hugging Face's format, folder of a run, or safetensors file of hpcai"""
    adapter: Path | None = None
    """folder of an adapter, written by peft or a run; null: none"""
    tokenizer: Path | None = None
    """tokenizer.json or its folder; null: the one beside the weights"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """of weights and computation; auto: bf16 on a GPU with fast bf16"""
    mesh: AxesConfig = AxesConfig()


class TextConfig(PromptingConfig, SamplingConfig):
    """A trained model and the sampling of its texts."""

    stop: tuple[str, ...] = ()
    """stop strings: the first one generated ends the text, and is left out"""
    seed: int = 0
    """of sampling; each line of a file and each answer of a chat has a seed of its own"""
    capture: bool = True
    """capture a decode step as a CUDA graph"""

    @model_validator(mode="after")
    def _stops(self) -> Self:
        if not all(self.stop):
            raise ValueError("stop has an empty string, which would end every text at once; leave it out")
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        """The keyword arguments of generation."""
        return {"stop": self.stop, **{name: getattr(self, name) for name in SamplingConfig.model_fields}}


def run_command(schema: type[Any], main: Callable[[Any], None], args: Sequence[str], text: str = "", advice: str = "") -> None:
    """Run a command with its command-line ``args``. The setting ``text`` is literal: it may look like YAML, and in JSON's quotes
    it is text."""
    start = f"{text}="
    sys.argv[1:] = [f"{start}{json.dumps(word[len(start) :])}" if word.startswith(start) else word for word in args]
    config.run(schema, main, advice=advice)


def load_model(cfg: PromptingConfig, mesh: Any) -> tuple[Any, Any]:
    """Return the model, sharded over ``mesh``, and its pipeline, or None without pipeline stages.

    Each rank reads only its shard of the weights, except for pipeline stages with an adapter: these are read in full, then
    sharded."""
    import torch

    from hpcai.models.llm import LLM, Tokenizer, build_pipeline, load_adapter, load_deferred, merge, parallelize
    from hpcai.models.llm.load import read_settings
    from hpcai.nn.deferred_init import deferred, materialize
    from hpcai.train.auto_settings import has_fast_bf16

    mesh.check_axes("a model with prompts of its own on each replica", "replicate", "tensor", "context", "pipeline")
    settings = read_settings(cfg.weights)
    use_bf16 = cfg.precision == "bf16" or (cfg.precision == "auto" and mesh.device.type == "cuda" and has_fast_bf16(mesh.device))
    placement: dict[str, Any] = {"device": mesh.device, "dtype": torch.bfloat16 if use_bf16 else torch.float32}
    is_sharded, has_stages = mesh["tensor"].size * mesh["pipeline"].size > 1, mesh["pipeline"].size > 1
    sharded_load = is_sharded and not (has_stages and cfg.adapter is not None)
    if sharded_load:
        with deferred():
            model = parallelize(LLM(settings), mesh)
        pipeline = build_pipeline(model, mesh)
        materialize(load_deferred(model, cfg.weights), **placement)
    else:
        model = LLM.load(cfg.weights).to(placement["dtype"])
    if cfg.adapter is not None:
        load_adapter(model, cfg.adapter)
        merge(model)
    if not sharded_load:
        pipeline = build_pipeline(parallelize(model, mesh), mesh)
        model.to(**placement)
    if cfg.tokenizer is not None:
        model.tokenizer = Tokenizer.load(cfg.tokenizer)
    return model.eval(), pipeline
