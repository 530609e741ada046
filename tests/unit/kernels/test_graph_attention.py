"""Graph attention equals its formula, in values and gradients, for sorted edges with isolated nodes and pairs twice."""

import pytest
import torch
from torch import Tensor

from hpcai.kernels import graph_attention as kernel


def make_inputs(shared: bool, edges: int = 40, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    source, destination = torch.randint(0, 9, (edges,)), torch.randint(1, 6, (edges,)).sort().values  # 0 and 6 are isolated
    x = torch.randn(9, *(() if shared else (3,)), 4, dtype=dtype, requires_grad=True)
    scores = [(8 * torch.randn(n, 3, dtype=dtype)).requires_grad_() for n in (9, 7)]
    return scores[0], scores[1], x, torch.stack((source, destination))


@pytest.mark.parametrize("shared", [True, False])
def test_values_and_gradients(shared: bool) -> None:
    inputs = make_inputs(shared)
    out, expected = kernel.graph_attention(*inputs), kernel.reference(*inputs)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
    assert out.shape == (3, 7, 4) and not out[:, [0, 6]].any() and out[:, 1:6].all()
    grad = torch.randn_like(out)
    for own, known in zip(*(torch.autograd.grad(y, inputs[:3], grad) for y in (out, expected))):
        torch.testing.assert_close(own, known, rtol=1e-11, atol=1e-13)


def test_formula() -> None:
    source_score, destination_score, x, edges = (tensor.detach() for tensor in make_inputs(False))
    out = kernel.graph_attention(source_score, destination_score, x, edges, 0.1)
    for i in range(1, 6):
        j = edges[0, edges[1] == i]
        e = torch.nn.functional.leaky_relu(source_score[j] + destination_score[i], 0.1)
        torch.testing.assert_close(out[:, i], (e.softmax(0)[..., None] * x[j]).sum(0))


def test_scores_far_apart_one_edge_and_none() -> None:
    source_score, destination_score, x, edges = make_inputs(True, dtype=torch.float32)
    far = source_score.detach() + torch.arange(9)[:, None] * 1e4
    assert kernel.graph_attention(far, destination_score, x, edges).isfinite().all()
    for shared in (True, False):
        for sources, destinations in ((9, 7), (0, 7), (9, 0), (0, 0)):
            inputs = make_inputs(shared, 0)
            parts = inputs[0][:sources], inputs[1][:destinations], inputs[2][:sources]
            out = kernel.graph_attention(*parts, inputs[3])
            assert out.shape == (3, destinations, 4) and not out.any()
            assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), parts))
    only = torch.tensor([[8], [0]])
    torch.testing.assert_close(kernel.graph_attention(source_score, destination_score, x, only)[:, 0], x[8].expand(3, -1))


def test_compiled() -> None:
    inputs = make_inputs(False)
    out = torch.compile(kernel.graph_attention, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(out, kernel.graph_attention(*inputs))
