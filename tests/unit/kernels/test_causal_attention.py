"""Causal attention with windows, documents, soft caps and sinks is that of masked logits."""

from itertools import product

import torch

from hpcai.kernels.causal_attention import causal_attention


def test_attention_and_gradients_are_those_of_masked_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes, windows = product((1, 7, 33), (33, 40), (1, 4)), (None, 1, 3, 8, 50)
    for (queries, keys, heads), window, softcap, *has in product(shapes, windows, (None, 2.0), (False, True), (False, True)):
        sizes = ((2, 4, queries, 6), (2, heads, keys, 6), (2, heads, keys, 6), (4,))
        q, k, v, sinks = (torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes)
        documents = torch.randint(0, 2, (2, keys), generator=generator).cumsum(1) // 3
        inputs = (q, k, v, sinks)[: 3 + has[0]]
        actual = causal_attention(q, k, v, documents if has[1] else None, window, softcap, sinks if has[0] else None)
        logits = q @ k.repeat_interleave(4 // heads, 1).transpose(2, 3) / 6**0.5
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).triu(keys - queries - (window or keys) + 1)
        mask = mask & (documents[:, None, keys - queries :, None] == documents[:, None, None]) if has[1] else mask
        logits = torch.cat((logits.masked_fill(~mask, -torch.inf), sinks[:, None, None].expand(2, -1, queries, has[0])), -1)
        expected = logits.softmax(-1)[..., :keys] @ v.repeat_interleave(4 // heads, 1)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        for gradient, other in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (actual, expected))):
            torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)
