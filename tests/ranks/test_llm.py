"""Language models sharded over combinations of ``tensor``, ``context`` and ``pipeline`` train and are checkpointed as on one rank.
Each axis alone has its own file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, MeshError
from hpcai.models import llm
from hpcai.models.llm import LLM, LLMConfig
from hpcai.models.llm.families import read_config
from hpcai.nn.deferred_init import deferred, materialize
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.language_model import LLAMA, check_reshard, check_sharded_equals_full, with_shard
from tests.ranks.launch import on_ranks
from tests.ranks.shards import Shards, gather_full, local_shards
from tests.ranks.training import Case
from tests.reference_data import DATA, load_json

FAMILIES = "gemma", "olmo", "gpt_oss", "deepseek"
MESHES = [
    {"context": 2, "tensor": 2}, {"pipeline": 4}, {"pipeline": 2, "tensor": 2}, {"pipeline": 2, "context": 2}, {"replicate": 2},
    {"replicate": 2, "pipeline": 2},
]  # fmt: skip
EIGHT_RANKS = pytest.param({"replicate": 2, "tensor": 2, "pipeline": 2}, marks=pytest.mark.claim)


@pytest.mark.parametrize("axes", [*MESHES, EIGHT_RANKS], ids=str)
def test_sharded_equals_full(axes: dict[str, int]) -> None:
    """Train with one document per row, with several, and with adapters."""
    cases: list[Case] = [{"model": "tied"}, {"model": "gpt", "packed": True}, {"model": "llama", "adapted": True}]
    if list(axes) == ["pipeline"]:
        cases = [case | {"layers": 4} for case in cases]  # several per stage
    if "replicate" in axes:
        cases = [*with_shard({"model": "llama", "packed": True}, "optimizer", "weights"), {"model": "tied", "shard": "weights"}]
    check_sharded_equals_full(axes, cases)


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"context": 2}, {"pipeline": 2}, MESHES[0]], ids=str)
def test_parts_of_families_sharded_equal_full(axes: dict[str, int]) -> None:
    check_sharded_equals_full(axes, [{"model": name, "packed": name in ("gemma", "deepseek")} for name in FAMILIES])


@pytest.mark.parametrize("axes", [{"context": 2}, MESHES[0], MESHES[2], MESHES[5]], ids=str)
def test_multi_token_prediction_sharded_equals_full(axes: dict[str, int]) -> None:
    cases: list[Case] = [{"model": "mtp", "packed": True}, {"model": "tied mtp"}, {"model": "tied mtp", "adapted": True}]
    replicated = [*with_shard(cases[0] | {"experts": 2}, "optimizer", "weights"), cases[1] | {"shard": "weights"}]
    check_sharded_equals_full(axes, replicated if "replicate" in axes else cases)


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"replicate": 2, "tensor": 2}, {"replicate": 2, "context": 2}], ids=str)
def test_experts_over_replicas_equal_one_rank(axes: dict[str, int]) -> None:
    cases = [{"model": "deepseek", "experts": 2}, {"model": "gpt_oss", "experts": axes["replicate"], "shard": "optimizer"}]
    check_sharded_equals_full(axes, cases)


def test_a_checkpoint_is_resharded(tmp_path: Path) -> None:
    case = {"model": "tied", "layers": 4}
    meshes = [{"pipeline": 2, "tensor": 2}, {}, {"context": 4}, {"context": 2, "tensor": 2}]
    layouts = [*((axes, case) for axes in meshes), ({"replicate": 2, "context": 2}, case | {"shard": "optimizer"})]
    check_reshard(layouts, tmp_path)


def load_shards(mesh: Mesh) -> Shards:
    folder = DATA / "llm" / "llama31_tiny" / "hf"
    with deferred(0):
        model = llm.parallelize(LLM(read_config(folder)), mesh)
    materialize(llm.load_deferred(model, folder), "cpu")
    return local_shards(Step(model, llm.loss, StepConfig(precision="fp32", capture="none"), mesh))


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 4}], ids=str)
def test_each_rank_reads_its_shard_of_a_folder(axes: dict[str, int]) -> None:
    gathered = gather_full([[p for p in rank if p[0].endswith("weight")] for rank in on_ranks(axes, load_shards)])
    full = LLM.load(DATA / "llm" / "llama31_tiny" / "hf")
    for name, parameter in full.named_parameters():
        np.testing.assert_array_equal(gathered[f"{name} weight"], parameter.detach().numpy())


def error_text(mesh: Mesh, overrides: dict[str, Any]) -> str:
    try:
        llm.build_pipeline(llm.parallelize(LLM(LLMConfig(**LLAMA | overrides)), mesh), mesh)
    except (MeshError, ConfigError) as problem:
        return str(problem)
    return "done"


@pytest.mark.parametrize(("axes", "overrides", "text"), load_json("refused/sharded_llms"))
def test_errors_of_sharding(axes: dict[str, int], overrides: dict[str, Any], text: str) -> None:
    assert all(text in message for message in on_ranks(axes, error_text, overrides))
