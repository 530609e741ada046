"""Training of small language models, for tests of the forms of model parallelism.

A case names the model and overrides: layers, packed (several documents per row), adapted (LoRA), frozen, optimizer, shard.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig, LoRAConfig
from hpcai.nn.deferred_init import deferred
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks import training
from tests.ranks.training import STEPS, Case

LLAMA = {"vocabulary": 25, "width": 16, "layers": 2, "heads": 4, "key_heads": 2, "inner": 24, "positions": 16}
GPT = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA, "tied": {**LLAMA, "tied": True, "recompute": "layers"}, "gpt": {**GPT, "recompute": "selective"},
    "one key": {**LLAMA, "key_heads": 1, "recompute": "selective"},
    "gemma": {**LLAMA, "norm": "rms_zero_centered", "norm_position": "both", "feed": "geglu", "window": 3, "full_layers": (1,),
              "attention_softcap": 2.0, "logit_softcap": 3.0, "z_loss": 0.01, "scaled_embedding": True, "tied": True,
              "qk_norm": "head"},
    "olmo": {**LLAMA, "norm_position": "after", "qk_norm": "all", "bias": "attention"},
    "gpt_oss": {**LLAMA, "sinks": True, "window": 5, "full_layers": (1,), "bias": "attention", "recompute": "layers",
                "rotary": {"scaling": {"kind": "yarn", "original": 4}},
                "experts": {"count": 4, "top_k": 2, "inner": 12, "score": "softmax_after_topk", "bias": True, "clipped": True}},
    "deepseek": {**LLAMA, "key_heads": None, "latent": {"q_rank": 6, "kv_rank": 7, "nope": 4, "rope": 2, "value": 3},
                 "experts": {"count": 4, "top_k": 2, "inner": 8, "score": "sigmoid", "groups": 2, "correction": True, "shared": 12,
                             "dense_layers": (0,), "z_loss": 0.1, "bias_update_rate": 0.01}},
}  # fmt: skip
MODELS["mtp"] = {**MODELS["deepseek"], "mtp_layers": 2, "mtp_loss": 0.3, "window": 5}
MODELS["tied mtp"] = {**MODELS["tied"], "mtp_layers": 1, "scaled_embedding": True}
TARGETS = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    with deferred(seed):  # each rank initializes its shard of the same weights
        sizes = MODELS[case["model"]] | {name: case[name] for name in ("layers",) if name in case}
        mesh.sizes["expert"] = min(case.get("experts", 1), mesh["replicate"].size)
        model = llm.parallelize(LLM(LLMConfig(**sizes)), mesh)
        if case.get("adapted"):
            saved: Any = {"modules_to_save": ("norm",) if sizes.get("tied") else ("norm", "lm_head")}
            saved["rank_pattern"] = {"layers.1.self_attn.q_proj": 2}
            llm.adapt(model, LoRAConfig(rank=3, targets=TARGETS, base_dtype=case.get("frozen", "as they are"), **saved))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    settings: dict[str, Any] = {"precision": "fp64", "optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5, "ema_decay": 0.9}
    settings |= {"eps": 1e-5, "capture": "none"}  # gradients of key biases are rounding errors, which a smaller eps would amplify
    settings |= {name: case[name] for name in ("optimizer", "shard") if name in case}
    micros = 4 // mesh["replicate"].size if mesh["pipeline"].size > 1 else 2
    return Step(model, llm.loss, StepConfig(**settings, accumulate=micros), mesh, pipeline=llm.build_pipeline(model, mesh))


def batch(mesh: Mesh, step: int, packed: bool) -> Batch:
    """Return the rows of this replica, of four in all, with masked tokens and, with ``packed``, random document boundaries."""
    generator, axis = torch.Generator().manual_seed(step), mesh["replicate"]
    tokens = torch.randint(0, LLAMA["vocabulary"], (4, 17), generator=generator)
    counted = torch.rand(4, 17, generator=generator) < 0.8
    documents = (torch.rand(4, 17, generator=generator) < 0.2).cumsum(1)
    shards = [value.chunk(axis.size)[axis.rank] for value in (tokens, documents, counted)]
    return Batch(shards[0], shards[1] if packed else None, shards[2])


def batches(mesh: Mesh, case: Case, first: int = 0, steps: int = STEPS) -> list[Batch]:
    return [batch(mesh, step, case.get("packed", False)) for step in range(first, first + steps)]


def check_sharded_equals_full(axes: dict[str, int], cases: list[Case]) -> None:
    # A replica reports the mean of its own samples.
    values = () if "replicate" in axes else ("loss", "mtp_loss") if "mtp" in cases[0]["model"] else ("loss",)
    training.check_sharded_equals_full(axes, cases, new_step, batches, values)


def check_reshard(layouts: list[tuple[dict[str, int], Case]], folder: Path) -> None:
    training.check_reshard(layouts, folder, new_step, batches)


def with_shard(case: Case, *values: str) -> list[Case]:
    return [case | {"shard": value} for value in values]
