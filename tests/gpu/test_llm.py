"""Language models on a GPU: kernels, captured training steps, rows of several documents, and FP8."""

from itertools import product
from typing import Any

import pytest
import torch

from hpcai import dist
from hpcai.kernels import float8, triton_support, varlen_attention
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig
from hpcai.settings import StepConfig
from hpcai.train.auto_settings import enable_float8
from hpcai.train.step import Step
from tests.gpu.device import DEVICE, GPU, GRAPH, ON_GPU, cuda_only, disable_tf32, forbid_synchronization

MISSING = triton_support.MISSING
pytestmark = pytest.mark.skipif(ON_GPU and MISSING is not None, reason=f"kernels cannot be compiled: {MISSING}")
LLAMA: dict[str, Any] = {"vocabulary": 90, "width": 64, "layers": 2, "heads": 4, "key_heads": 2, "inner": 96, "positions": 64}
GPT = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
MODELS = {"llama": LLAMA, "gpt": GPT}
NO_FP8 = ON_GPU and torch.cuda.is_available() and not float8.is_supported(DEVICE)


@cuda_only  # elsewhere Triton's interpreter has run these cases
def test_the_kernels_are_their_formulas() -> None:
    from tests.slow import formulas

    for shape, (x, y), has_weight in product(formulas.RMS_NORM_SHAPES, formulas.DTYPES, (True, False)):
        formulas.check_rms_norm(shape, x, y, GPU, has_weight)
    for case, kind, of, each, neighbours in product(formulas.ROTARY, formulas.ULP, formulas.ULP, (True, False), (True, False)):
        formulas.check_rotary(case, kind, of, each, GPU, neighbours)


def make_batch(seed: int, packed: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, LLAMA["vocabulary"], (2, 65), generator=draw)
    rows = (torch.rand(2, 65, generator=draw) < 0.1).cumsum(1)
    return Batch(tokens.to(DEVICE), rows.to(DEVICE) if packed else None)


def new_step(model: str, recompute: str = "none", **overrides: Any) -> Step:
    torch.manual_seed(0)
    cfg = LLMConfig(**MODELS[model], recompute=recompute)
    return Step(LLM(cfg), llm.loss, StepConfig(lr=1e-3, clip=1.0, **overrides), dist.single_process(DEVICE), graph=GRAPH)


def mean(values: dict[str, Any]) -> float:
    total, count = values["loss"]
    return float(total) / float(count)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=cuda_only)], ids=["texts", "documents"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
@pytest.mark.parametrize("model", MODELS)
def test_captured_is_eager_with_any_recomputation(model: str, precision: str, packed: bool) -> None:
    disable_tf32()
    steps = [new_step(model, precision=precision), *(
        new_step(model, recompute, precision=precision, capture="whole") for recompute in ("none", "selective", "layers")
    )]  # fmt: skip
    for i in range(5):
        losses = [mean(step(make_batch(i, packed))) for step in steps]
        assert losses[1:] == pytest.approx(losses[:1] * 3, rel=1e-4 if precision == "fp32" else 1e-2)
    assert all(step._capture is not None and step._capture.recorded() == 1 for step in steps[1:])


@cuda_only
def test_documents_wait_for_nothing_and_are_those_of_a_mask() -> None:
    draw = torch.Generator(GPU).manual_seed(0)
    leaves = [
        torch.randn(3, 500, heads, 64, device=GPU, generator=draw, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (8, 2, 2)
    ]  # fmt: skip
    rows = (torch.rand(3, 500, device=GPU, generator=draw) < 0.03).cumsum(1)
    weight = torch.randn(3, 8, 500, 64, device=GPU, generator=draw, dtype=torch.bfloat16)
    with forbid_synchronization():
        outputs = varlen_attention.varlen_attention(*leaves, rows)
        outputs = [outputs, *torch.autograd.grad(outputs, leaves, weight)]
    leaves64 = [x.detach().double().requires_grad_() for x in leaves]
    expected = varlen_attention.reference(*leaves64, rows)
    for actual, gradient in zip(outputs, [expected, *torch.autograd.grad(expected, leaves64, weight.double())], strict=True):
        assert float((actual.double() - gradient).detach().norm()) <= 1e-2 * float(gradient.detach().norm())
    many = torch.arange(500, device=GPU).expand(3, -1)
    assert varlen_attention.varlen_attention(*leaves, many).isnan().all(), "more documents than the kernel supports"


@cuda_only
def test_documents_make_no_mask() -> None:
    tokens = 32_768
    leaves = [torch.randn(1, tokens, 4, 64, device=GPU, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)]
    rows = (torch.arange(tokens, device=GPU) // 700)[None]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    varlen_attention.varlen_attention(*leaves, rows).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * tokens // 2, "half a byte for each pair of tokens"


@pytest.mark.skipif(NO_FP8, reason="this GPU has no FP8 matrix products")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
@pytest.mark.parametrize("model", MODELS)
def test_in_fp8_a_captured_step_is_that_of_the_twins(model: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    disable_tf32()
    steps = [new_step(model, precision=precision, matmul="fp8", capture=mode) for mode in ("none", "whole")]
    all_losses = [[mean(step(make_batch(i))) for step in steps] for i in range(5)]
    monkeypatch.setattr(float8, "is_supported", lambda device: False)
    reference, unquantized = new_step(model, precision=precision, matmul="precision"), new_step(model, precision=precision)
    enable_float8(reference.model, reference.cfg.model_copy(update={"matmul": "fp8"}), torch.device("cpu"))
    for i, losses in enumerate(all_losses):
        assert losses[1] == pytest.approx(losses[0], rel=1e-4 if precision == "fp32" else 1e-2)
        assert losses[0] == pytest.approx(mean(reference(make_batch(i))), rel=1e-3 if precision == "fp32" else 1e-2)
        assert losses[0] == pytest.approx(mean(unquantized(make_batch(i))), rel=2e-2)
    assert steps[1]._capture is not None and steps[1]._capture.recorded() == 1
