"""Attention to a paged KV cache.   T tokens of a step, H heads, D channels, K KV heads, G = H/K, P tokens of a block

Tokens of a step lie one after another: first the queries, of texts with few new tokens, then the chunks of texts in prefill.
Queries attend to the blocks of the pool where they lie, without a copy: each block with its R queries. The results of all blocks of
a query are merged by their sums of exponentials (Dao et al. 2023, "Flash-Decoding"). A block of several texts, such as of a common
prompt, is read once for all of them (Juravsky et al. 2024, "Hydragen").
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.kernels.causal_attention import causal_attention
from hpcai.kernels.paged_attention import paged_attention
from hpcai.models.llm.model import CausalAttention

FEW = 8
"""New tokens of a text that are queries, at most"""
_DENSE = 0.5  # fraction of the lowest blocks from which they are read in place: those that nothing attends to take time as well


class Span(NamedTuple):
    """Tokens of a text that a step computes."""

    blocks: list[int]
    """of the text, for these tokens and all before them"""
    first: int
    """position"""
    tokens: Sequence[int]
    sampled: int
    """the last tokens of which logits are needed"""


@dataclass
class Group:
    """N blocks that each have R queries or fewer."""

    blocks: Any
    """their numbers in the pool [N], or a slice"""
    queries: Tensor
    """[N, R]"""
    offsets: Tensor
    """[N, R] the position of a query, from that of the first token of the block; negative: no query"""
    _biases: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def bias(self, k: Tensor, heads: int, window: int | None) -> tuple[Tensor, Tensor]:
        """Return what is added to logits, 0 for tokens to attend to, and the last of these; layers share them.   [N K, R G, P], and
        [N K, R G, 1]"""
        if (key := (*k.shape[1:3], heads, window)) not in self._biases:
            distance = self.offsets[..., None] - torch.arange(k.shape[2], device=k.device)  # [N, R, P]
            mask = (distance >= 0) & (distance < window) if window is not None else distance >= 0
            bias = torch.zeros(mask.shape, dtype=k.dtype, device=k.device).masked_fill_(~mask, torch.finfo(k.dtype).min)
            last = self.offsets.clamp(0, k.shape[2] - 1)[..., None]
            first, second = (x.repeat_interleave(k.shape[1], 0).repeat_interleave(heads, 1) for x in (bias, last))
            self._biases[key] = first, second
        return self._biases[key]


class QueryTable:
    """The blocks of the queries of a step. ``rows`` [queries, most blocks of one]: The rows of each query in the results of all
    ``groups``, which have one for each block and query [N R], and after which comes one of no query."""

    def __init__(self, spans: Sequence[Span], size: int, device: torch.device) -> None:
        queries = [(span.blocks, span.first + n) for span in spans for n in range(len(span.tokens))]
        users: dict[int, list[tuple[int, int]]] = {}  # of each block: query, and index of the block in its text
        for query, (blocks, position) in enumerate(queries):
            for index in range(position // size + 1):
                users.setdefault(blocks[index], []).append((query, index))
        own = max(len(span.tokens) for span in spans)
        single, shared = ({b: each for b, each in users.items() if (len(each) > own) == more} for more in (False, True))
        used = max(single, default=-1) + 1
        if single and len(single) >= _DENSE * used:
            single = {block: single.get(block, []) for block in range(used)}
        rows = np.full((len(queries), max(position // size + 1 for _, position in queries)), -1)
        self.groups, count = list[Group](), 0
        for part in filter(None, (single, shared)):
            most = max(map(len, part.values()))
            numbers, offsets = np.zeros((len(part), most), int), np.full((len(part), most), -1)
            for row, pairs in enumerate(part.values()):
                for column, (query, index) in enumerate(pairs):
                    numbers[row, column], offsets[row, column] = query, queries[query][1] - index * size
                    rows[query, index] = count + row * most + column
            is_dense = part is single and len(part) == used
            where: Any = slice(used) if is_dense else device_tensor([*part], device)
            self.groups.append(Group(where, device_tensor(numbers, device), device_tensor(offsets, device)))
            count += len(part) * most
        rows[rows < 0] = count
        self.rows = device_tensor(rows, device)


class Layout:
    """The spans of a step on the device, those of ``FEW`` tokens first. ``sampled``: The tokens of which logits are needed.

    ``columns``: Queries have tables of so many blocks [queries, M], as a GPU's kernel takes them, in place of a ``QueryTable``.
    ``key``: That of the graph of the step, if it has one.
    """

    def __init__(self, spans: Sequence[Span], size: int, device: torch.device, columns: int = 0) -> None:
        self.spans, self.size = spans, size
        few = [span for span in spans if len(span.tokens) <= FEW]
        self.queries = sum(len(span.tokens) for span in few)
        self.prefill = [(span.first, len(span.tokens), device_tensor(span.blocks, device)) for span in self.spans[len(few) :]]
        positions = [*chain.from_iterable(range(span.first, span.first + len(span.tokens)) for span in self.spans)]
        self.positions = device_tensor(positions, device)[None]
        self.tokens = device_tensor([token for span in self.spans for token in span.tokens], device)[None]
        blocks = [span.blocks[(span.first + n) // size] for span in self.spans for n in range(len(span.tokens))]
        self.blocks = device_tensor(blocks, device)
        ends = np.cumsum([len(span.tokens) for span in self.spans]).tolist()
        sampled = [*chain.from_iterable(range(end - span.sampled, end) for end, span in zip(ends, self.spans))]
        self.sampled = device_tensor(sampled or [0], device)
        self.table: QueryTable | Tensor | None = None
        if few and columns:
            rows = [[*span.blocks, *span.blocks[-1:] * (columns - len(span.blocks))] for span in few]
            self.table = device_tensor(np.repeat(rows, [len(span.tokens) for span in few], 0), device)
        elif few:
            self.table = QueryTable(few, size, device)
        self.key: Any = None
        self.row_cache: dict[int, Tensor] = {}

    def rows(self, heads: int) -> Tensor:
        """Return the rows of the new tokens in a pool of [blocks K P, D].   [K T]"""
        if heads not in self.row_cache:
            first = self.blocks * heads + torch.arange(heads, device=self.blocks.device)[:, None]
            self.row_cache[heads] = (first * self.size + self.positions % self.size).flatten()
        return self.row_cache[heads]

    def copy_(self, other: "Layout") -> "Layout":
        """Copy the values of a layout of the same shapes, both of queries alone with tables."""
        for name in ("tokens", "positions", "blocks", "sampled", "table"):
            getattr(self, name).copy_(getattr(other, name))
        return self


def device_tensor(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy values of the host to the device. The host does not wait."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, table: QueryTable, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of queries to the tokens of their texts up to their own; arguments as for ``causal_attention``.

    Shape: q [queries, H, D]; k and v [blocks of the pool, K, P, D]; sinks [H] -> [queries, H, D]
    """
    grouped = q.unflatten(1, (k.shape[1], -1))  # [queries, K, G, D]
    values, sums = zip(*(_attend_blocks(grouped, k, v, group, window, softcap) for group in table.groups))
    none = sums[0].new_full((1, *sums[0].shape[1:]), -torch.inf), values[0].new_zeros(1, *values[0].shape[1:])
    logs, each = torch.cat((*sums, none[0]))[table.rows], torch.cat((*values, none[1]))[table.rows]  # [queries, blocks, K, G, ...]
    if sinks is not None:
        logs = torch.cat((logs, sinks.to(logs).view(1, 1, *logs.shape[2:]).expand(len(logs), -1, -1, -1)), 1)
    weights = logs.softmax(1)[:, : each.shape[1]].to(each.dtype)
    return (each * weights[..., None]).sum(1).flatten(1, 2)


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, group: Group, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the attention to each block alone [N R, K, G, D], and the logarithms of its sums of exponentials [N R, K, G].

    Shape: q [queries, K, G, D]"""
    (count, queries), heads, scale = group.queries.shape, q.shape[2], q.shape[-1] ** -0.5
    keys, values = (pool[group.blocks].flatten(0, 1) for pool in (k, v))  # [N K, P, D]
    rows, (bias, last) = q[group.queries].transpose(1, 2).reshape(len(keys), queries * heads, -1), group.bias(k, heads, window)
    if softcap is None:
        logits = torch.baddbmm(bias, rows, keys.mT, alpha=scale)
    else:
        logits = softcap * torch.tanh(torch.bmm(rows, keys.mT) * (scale / softcap)) + bias
    logits = logits.to(torch.promote_types(q.dtype, torch.float32))
    weights = logits.log_softmax(-1)
    # Logits are the logarithms of weights plus that of the sum: taken at a token that is attended to, a tenth of logsumexp's time.
    sums = logits.gather(2, last) - weights.gather(2, last)
    y = torch.bmm(weights.exp().to(v.dtype), values)
    y, sums = (x.view(count, -1, queries, heads, x.shape[-1]).transpose(1, 2).flatten(0, 1) for x in (y, sums))
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
        parts, first = list[Tensor](), layout.queries
        if first:
            queries, (keys, values) = q[0, :, :first].transpose(0, 1), self.pools
            if isinstance(layout.table, QueryTable):
                y = blockwise_attention(queries, keys, values, layout.table, *args)
            else:
                y = paged_attention(queries, keys, values, layout.table, layout.positions[0, :first], *args)
            parts.append(y.transpose(0, 1)[None])
        for before, count, blocks in layout.prefill:
            own = [x[:, :, first : first + count] for x in (q, k, v)]
            if before:
                own[1:] = (p[blocks].transpose(0, 1).flatten(1, 2)[None, :, : before + count] for p in self.pools)
            parts.append(causal_attention(own[0], own[1], own[2], None, *args))
            first += count
        return torch.cat(parts, 2)
