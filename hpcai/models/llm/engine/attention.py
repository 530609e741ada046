"""Attention to a paged KV cache.   T tokens of a step, H heads, D channels, K KV heads, G = H/K, P tokens of a block, B texts

Tokens of a step lie one after another: first one each of the texts that decode, then the chunks of those in prefill. Decode attends
to the blocks of the pool where they lie, without a copy: each block with the query of its text. The results of the blocks of a text
are merged by their maxima and sums of exponentials (Dao et al. 2023, "Flash-Decoding"). A block of several texts, such as of a common
prompt, is read once for all of them (Juravsky et al. 2024, "Hydragen").
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcai.kernels.causal_attention import causal_attention
from hpcai.models.llm.engine.scheduler import Chunk
from hpcai.models.llm.model import CausalAttention

_DENSE = 0.5  # fraction of the lowest blocks from which they are read in place: those of no text take time as well


@dataclass
class Group:
    """N blocks that each have R texts."""

    blocks: Any
    """their numbers in the pool [N], or a slice"""
    texts: Tensor
    """[N, R]"""
    first: Tensor
    """[N] position of the first token of a block in its texts"""
    lengths: Tensor
    """[N] number of tokens"""
    positions: Tensor
    """[N, R] of the new token of each text"""
    _biases: dict[Any, Tensor] = field(default_factory=dict)

    def bias(self, k: Tensor, heads: int, window: int | None) -> Tensor:
        """Return what is added to logits, 0 for tokens to attend to; layers share it.   [N K, R G or 1, P]"""
        if (key := (*k.shape[1:3], window)) not in self._biases:
            entries = torch.arange(k.shape[2], device=k.device)
            mask = (entries < self.lengths[:, None])[:, None]  # [N, R or 1, P]
            if window is not None:
                mask = mask & (self.first[:, None, None] + entries > self.positions[:, :, None] - window)
                mask = mask.repeat_interleave(heads, 1)
            bias = torch.zeros(mask.shape, dtype=k.dtype, device=k.device).masked_fill_(~mask, torch.finfo(k.dtype).min)
            self._biases[key] = bias.repeat_interleave(k.shape[1], 0)
        return self._biases[key]


@dataclass(frozen=True)
class DecodeTable:
    """The blocks of the texts of a decode step. The result of a group has a row for each block and text [N R]."""

    groups: Sequence[Group]
    rows: Tensor
    """[B, most blocks of a text] the rows of each text in the results of all groups, after which comes one of no text"""


class Layout:
    """The chunks of a step on the device: ``decode`` single tokens, then others. ``sampled``: The last tokens of the chunks after which
    a token is sampled."""

    def __init__(self, chunks: Sequence[Chunk], size: int, device: torch.device) -> None:
        self.size, self.decode = size, sum(chunk.count == 1 for chunk in chunks)
        self.prefill = [(chunk.request.computed, chunk.count, device_tensor(chunk.request.blocks, device))
                        for chunk in chunks[self.decode :]]  # fmt: skip
        spans = [(chunk.request, range(chunk.request.computed, chunk.request.computed + chunk.count)) for chunk in chunks]
        positions = [*chain.from_iterable(span for _, span in spans)]
        self.positions = device_tensor(positions, device)[None]
        self.tokens = device_tensor([request.tokens[n] for request, span in spans for n in span], device)[None]
        self.blocks = device_tensor([request.blocks[n // size] for request, span in spans for n in span], device)
        ends = np.cumsum([chunk.count for chunk in chunks]) - 1
        self.sampled = device_tensor([end for end, chunk in zip(ends, chunks) if chunk.samples] or [0], device)
        self.table = decode_table(chunks[: self.decode], size, device) if self.decode else None
        self._rows: dict[int, Tensor] = {}

    def rows(self, heads: int) -> Tensor:
        """Return the rows of the new tokens in a pool of [blocks K P, D].   [K T]"""
        if heads not in self._rows:
            first = self.blocks * heads + torch.arange(heads, device=self.blocks.device)[:, None]
            self._rows[heads] = (first * self.size + self.positions % self.size).flatten()
        return self._rows[heads]


def device_tensor(values: Any, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.int64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def decode_table(chunks: Sequence[Chunk], size: int, device: torch.device) -> DecodeTable:
    """Return the table of texts with one new token each, whose blocks are those up to this token."""
    users: dict[int, list[tuple[int, int]]] = {}  # of each block: text, and its index there
    for text, chunk in enumerate(chunks):
        for index, block in enumerate(chunk.request.blocks):
            users.setdefault(block, []).append((text, index))
    single = {block: each for block, each in users.items() if len(each) == 1}
    shared = {block: each for block, each in users.items() if len(each) > 1}
    used = max(single, default=-1) + 1
    if single and len(single) >= _DENSE * used:
        single = {block: single.get(block, []) for block in range(used)}
    rows = np.full((len(chunks), max(len(chunk.request.blocks) for chunk in chunks)), -1)
    groups, count = list[Group](), 0
    for each in (single, shared):
        if not each:
            continue
        most = max(map(len, each.values()))
        texts, first, lengths = np.zeros((len(each), most), int), np.zeros(len(each), int), np.zeros(len(each), int)
        for row, pairs in enumerate(each.values()):
            for column, (text, index) in enumerate(pairs):
                texts[row, column], first[row] = text, index * size
                lengths[row] = min(chunks[text].request.computed + 1 - index * size, size)
                rows[text, index] = count + row * most + column
        blocks: Any = slice(len(each)) if most == 1 and len(each) == used else device_tensor([*each], device)
        positions = np.array([chunk.request.computed for chunk in chunks])[texts]
        groups.append(Group(blocks, *(device_tensor(values, device) for values in (texts, first, lengths, positions))))
        count += len(each) * most
    rows[rows < 0] = count
    return DecodeTable(groups, device_tensor(rows, device))


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, table: DecodeTable, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of one new token of each text to all tokens of the text; arguments as for ``causal_attention``.

    Shape: q [B, H, D]; k and v [blocks of the pool, K, P, D]; sinks [H] -> [B, H, D]
    """
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, K, G, D]
    values, sums = zip(*(_attend_blocks(grouped, k, v, group, window, softcap) for group in table.groups))
    none = sums[0].new_full((1, *sums[0].shape[1:]), -torch.inf), values[0].new_zeros(1, *values[0].shape[1:])
    logs, each = torch.cat((*sums, none[0]))[table.rows], torch.cat((*values, none[1]))[table.rows]  # [B, blocks of a text, K, G, ...]
    if sinks is not None:
        logs = torch.cat((logs, sinks.to(logs).view(1, 1, *logs.shape[2:]).expand(len(logs), -1, -1, -1)), 1)
    weights = logs.softmax(1)[:, : each.shape[1]].to(each.dtype)
    return (each * weights[..., None]).sum(1).flatten(1, 2)


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, group: Group, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the attention to each block alone [N R, K, G, D], and the logarithms of its sums of exponentials [N R, K, G].

    Shape: q [B, K, G, D]"""
    (count, texts), heads = group.texts.shape, q.shape[2]
    keys, values = (pool[group.blocks].flatten(0, 1) for pool in (k, v))  # [N K, P, D]
    queries = q[group.texts].transpose(1, 2).reshape(len(keys), texts * heads, -1)
    bias, scale = group.bias(k, heads, window), q.shape[-1] ** -0.5
    if softcap is None:
        logits = torch.baddbmm(bias, queries, keys.mT, alpha=scale)
    else:
        logits = softcap * torch.tanh(torch.bmm(queries, keys.mT) * (scale / softcap)) + bias
    logits = logits.to(torch.promote_types(q.dtype, torch.float32))
    weights = logits.log_softmax(-1)
    last = (group.lengths - 1).clamp(min=0).repeat_interleave(k.shape[1])[:, None, None].expand(*logits.shape[:2], 1)
    sums = logits.gather(2, last) - weights.gather(2, last)  # much less time than logsumexp, which they are the inputs of
    y = torch.bmm(weights.exp().to(v.dtype), values)
    y, sums = (x.view(count, -1, texts, heads, x.shape[-1]).transpose(1, 2).flatten(0, 1) for x in (y, sums))
    return y, sums[..., 0]


class PagedAttention(CausalAttention):
    """Attention of one layer, whose keys and values are in the pool.   q [1, H, T, D], k and v [1, K, T, D] -> [1, H, T, D]

    ``layout``: That of the step. ``count`` blocks of ``size`` tokens are allocated in the first step."""

    def __init__(self, attention: CausalAttention, count: int, size: int) -> None:
        super().__init__(attention.window, attention.softcap)
        self.count, self.size = count, size
        self.layout: Any = None
        self.pools: tuple[Tensor, ...] = ()

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Write k and v of new tokens into the pool, and return them.   two of [1, K, T, D]"""
        if not self.pools:
            self.pools = tuple(x.new_zeros(self.count, x.shape[1], self.size, x.shape[3]) for x in new)
        for pool, x in zip(self.pools, new):
            pool.view(-1, x.shape[3]).index_copy_(0, self.layout.rows(x.shape[1]), x[0].flatten(0, 1))
        return new

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        layout, args = self.layout, (self.window, self.softcap, sinks)
        parts, first = list[Tensor](), layout.decode
        if first:
            y = paged_attention(q[0, :, :first].transpose(0, 1), *self.pools, layout.table, *args)
            parts.append(y.transpose(0, 1)[None])
        for computed, count, blocks in layout.prefill:
            own = [x[:, :, first : first + count] for x in (q, k, v)]
            if computed:
                own[1:] = (p[blocks].transpose(0, 1).flatten(1, 2)[None, :, : computed + count] for p in self.pools)
            parts.append(causal_attention(own[0], own[1], own[2], None, *args))
            first += count
        return torch.cat(parts, 2)
