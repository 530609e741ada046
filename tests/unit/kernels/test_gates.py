"""Gates: which implementation runs where. Values and gradients are compared in test_attention.py."""

from typing import Any

import pytest
import torch

from hpcai.kernels import gates

pytestmark = pytest.mark.usefixtures("one_thread")


def test_kernels_run_for_their_dtypes_only_and_torch_compile_traces_the_reference(kernel_calls: Any) -> None:
    calls, one, wide = kernel_calls("gates", gate=gates.reference), torch.ones(2, 6), torch.ones(2, 6, dtype=torch.float64)
    for x, g in ((wide, wide), (one.half(), one.half()), (one[:1], one), (one.bfloat16(), one)):
        gates.gate(x, g)
    compiled = torch.compile(gates.gate, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(one, 2 * one, None), gates.reference(one, 2 * one)) and not calls, "the reference"
    gates.gate(one, one, one[:, :1]), gates.gate(one.bfloat16(), one.bfloat16())
    assert calls == [("gate", torch.float32), ("gate", torch.bfloat16)]
