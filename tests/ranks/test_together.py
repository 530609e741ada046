"""Tensor, pipeline and context parallelism, copies and divided optimizers, in pairs and all at once: the same training as on one
process, with a loss that is a mean over tokens. And a model that no process has room for."""

import ctypes
import resource
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.cli.bench.timing import processes
from hpcai.dist.mesh import Mesh
from hpcai.parallel.context import CausalContext, Own, Total
from hpcai.parallel.pipeline import Pipeline
from hpcai.parallel.replicate import sum_over
from hpcai.parallel.tensor import Entropy, cut_inputs, cut_outputs, cut_words, heads
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train import rng
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.saved import Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.pieces import Pieces, joined, pieces
from tests.ranks.transformer import HEADS, Transformer, batch, loss

STEPS, MICRO = 2, 4
PAIRS = [("tensor", "pipeline"), ("tensor", "context"), ("pipeline", "context"), ("replicate", "tensor"), ("replicate", "context")]
MESHES = [*({one: 2, other: 2} for one, other in PAIRS), {"replicate": 2, "tensor": 2, "pipeline": 2}]


def parallelize(model: Transformer, mesh: Mesh) -> Pipeline:
    """``model``, in place, over all axes of the mesh -> what goes forward and backward through it."""
    tensor, context = mesh["tensor"], mesh["context"]
    cut_words(model.embedding, tensor)
    for block in model.blocks:
        attention, feed = block.attention, block.feed
        cut_outputs(attention.qkv, tensor, heads(tensor, attention.size, HEADS))
        cut_inputs(attention.out, tensor)
        cut_outputs(feed.gate_up, tensor, [feed.gate_up.out_features // 2] * 2)
        cut_inputs(feed.down, tensor)
        attention.attend = CausalContext(context)
    cut_outputs(model.head, tensor)
    if tensor.size > 1:
        model.entropy = Entropy(tensor, model.embedding.num_embeddings)
    model.own, model.total = Own(context, 1), Total(context)
    sum_over(model, context)
    return Pipeline(model, mesh)


def new_step(mesh: Mesh, tied: bool, **words: Any) -> Step:
    with rng.seeds(5):
        model = Transformer(tied=tied)
        act = parallelize(model, mesh)
    words = {"precision": "fp64", "optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5, "average": 0.9} | words
    return Step(model, loss, StepConfig(accumulate=MICRO // mesh["replicate"].size, bucket_mb=0.01, **words), mesh, act=act)


def trained(mesh: Mesh, tied: bool, words: dict[str, Any], folder: Path | None = None) -> tuple[Pieces, list[float], float]:
    step, axis, sums = new_step(mesh, tied, **words), mesh["replicate"], np.zeros(2)
    for i in range(STEPS):
        samples = {name: t.chunk(axis.size)[axis.rank] for name, t in batch(i, 8, 16).items()}
        total, count = step(samples, 0.05 / (i + 1))["loss"]
        sums = np.array([float(total), float(count)])
    step.check()
    if folder is not None:
        Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))
    return pieces(step), sums.tolist(), step._norm().item()


@cache
def alone(tied: bool) -> tuple[dict[str, Any], list[float], float]:
    held, sums, norm = trained(Mesh({}), tied, {})
    return joined([held]), sums, norm


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: " x ".join(axes))
def test_pairs_equal_one_process(axes: dict[str, int], tmp_path: Path) -> None:
    for shard in ("none", "optimizer", "weights") if "replicate" in axes else ("none",):
        tied = shard != "weights" and "context" not in axes
        right, sums, norm = alone(tied)
        found = on_ranks(axes, trained, tied, {"shard": shard}, tmp_path / shard)
        copies = axes.get("replicate", 1)
        np.testing.assert_allclose(np.sum([each for _, each, _ in found], 0) * copies / len(found), sums, rtol=1e-12)
        np.testing.assert_allclose([each for *_, each in found], norm, rtol=1e-11)
        held = joined([each for each, *_ in found])
        for name, value in right.items():
            if "gradient" not in name or name in held:  # of a sum over tokens, not yet divided, as on one process
                np.testing.assert_allclose(held[name], value, rtol=1e-11, atol=1e-12, err_msg=f"{axes} {shard} {name}")
        saved = read_tensors(tmp_path / shard / f"step-{STEPS:08d}")
        for name, value in right.items():
            base, what = name.split()
            if what == "weight":
                np.testing.assert_allclose(saved[f"model/{base}"], value, rtol=1e-11, atol=1e-12)


# ---- a model that no process has room for

WIDE = {"width": 384, "layers": 29, "vocabulary": 512}  # 43 M numbers, 173 MB: a share is 43 MB, and so are its gradients
ROOM = 163 << 20


def limited(mesh: Mesh, words: dict[str, Any], folder: str) -> str:
    """Two steps and a save in a process that may take ``ROOM`` bytes more than it has."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: what a tensor leaves goes back at once
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 20))  # 8 MiB for each thread would count
    libc.pthread_setattr_default_np(attributes)
    data = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (data + ROOM, resource.RLIM_INFINITY))
    try:
        with rng.seeds(5):
            model = Transformer(**WIDE)
            act = parallelize(model, mesh)
        plain = {"precision": "fp32", "optimizer": "sgd", "momentum": 0, "bucket_mb": 4, "accumulate": 2}
        cfg = StepConfig.model_validate(plain | words)
        step = Step(model, loss, cfg, mesh, act=act)
        for i in range(2):
            step(batch(i, cfg.accumulate, 8, WIDE["vocabulary"]), 1e-4)
        step.check()
        Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=2))
    except (RuntimeError, MemoryError) as problem:
        return str(problem)
    return ""


LITTLE: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tensor": 4}, {}), ({"tensor": 2, "pipeline": 2}, {}), ({"replicate": 4}, {"shard": "weights", "accumulate": 1}),
    ({"replicate": 2}, {}),
]  # fmt: skip


def in_little_room(folder: Path) -> list[list[str]]:
    torch.set_num_threads(1)
    return [on_ranks(axes, limited, words, str(folder / str(n)), timeout=100, fresh=True) for n, (axes, words) in enumerate(LITTLE)]


def test_a_model_that_no_process_has_room_for_is_built_trained_and_saved(tmp_path: Path) -> None:
    """Forked from a new interpreter: what a large one has left would be room, or take it."""
    with processes(1) as new:
        *cut, whole = new.submit(in_little_room, tmp_path).result(timeout=400)
    assert cut == [[""] * 4] * 3
    assert all("memory" in text for text in whole), "what is whole has no room"
    for n in range(3):
        saved = read_tensors(tmp_path / str(n) / "step-00000002")
        assert 4 * sum(t.numel() for name, t in saved.items() if name.startswith("model/")) > ROOM
