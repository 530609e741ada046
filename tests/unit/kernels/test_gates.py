"""Gates: their derivatives, which form runs where, and what a compiler sees. That fused is plain is in test_attention.py."""

from typing import Any

import pytest
import torch

from hpcai.kernels import gates

pytestmark = pytest.mark.usefixtures("one_thread")


def test_kernels_get_what_they_have_and_a_compiler_sees_operations_of_torch(asked: Any) -> None:
    given, one, wide = asked("gates", gate=gates.reference), torch.ones(2, 6), torch.ones(2, 6, dtype=torch.float64)
    for x, g in ((wide, wide), (one.half(), one.half()), (one[:1], one), (one.bfloat16(), one)):
        gates.gate(x, g)
    compiled = torch.compile(gates.gate, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(one, 2 * one, None), gates.reference(one, 2 * one)) and not given, "the twin's"
    gates.gate(one, one, one[:, :1]), gates.gate(one.bfloat16(), one.bfloat16())
    assert given == [("gate", torch.float32), ("gate", torch.bfloat16)]
