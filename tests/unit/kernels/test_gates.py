"""Gates: selection of the implementation. Values and gradients are compared in test_attention.py."""

from typing import Any

import pytest
import torch

from hpcai.kernels import gates

pytestmark = pytest.mark.usefixtures("one_thread")


def test_kernels_run_for_their_dtypes_only_and_torch_compile_traces_the_reference(kernel_calls: Any) -> None:
    calls, narrow, wide = kernel_calls("gates", gate=gates.reference), torch.ones(2, 6), torch.ones(2, 6, dtype=torch.float64)
    for x, g in ((wide, wide), (narrow.half(), narrow.half()), (narrow[:1], narrow), (narrow.bfloat16(), narrow)):
        gates.gate(x, g)
    compiled = torch.compile(gates.gate, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(narrow, 2 * narrow, None), gates.reference(narrow, 2 * narrow)) and not calls, "the reference"
    gates.gate(narrow, narrow, narrow[:, :1]), gates.gate(narrow.bfloat16(), narrow.bfloat16())
    assert calls == [("gate", torch.float32), ("gate", torch.bfloat16)]
