"""Mixture-of-experts layers (Shazeer et al. 2017; Fedus et al., "Switch Transformers", 2022): a router sends each token to a few of
many feed-forward layers, the experts, and their weighted outputs are summed.

    layer = MoE(Router(256, experts=8, top_k=2, balance_loss=0.01), Experts(256, 352, experts=8))

Pairs of a token and one of its experts are sorted by expert, so that each expert multiplies neighbouring rows. Nothing is read from
a GPU: all sizes are known, except for the all-to-all of expert parallelism without a capacity (``hpcai.parallel.expert``).

N tokens, C channels, E experts, k experts of each token, I inner channels of an expert, R rows: N k, or E times the capacity.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dynamo import UntransformedFunction, disable_dynamo
from hpcai.errors import ConfigError
from hpcai.kernels.activations import swiglu
from hpcai.kernels.chunking import chunk_size
from hpcai.kernels.grouped_mm import grouped_linear, has_torch_kernel, has_triton_kernel
from hpcai.nn.matmul import cast_to_autocast
from hpcai.nn.recompute import cheap
from hpcai.nn.seam import Seam

_SINKHORN_ROUNDS = 8
_CPU = 1 << 18  # bytes of a chunk on a CPU
_GATE_LIMIT, _GATE_SLOPE = 7.0, 1.702  # of gpt-oss
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Router(nn.Module):
    """Choose the experts of each token, and their weights.   x [N, C] -> weights [N, k], experts [N, k] int64

    Logits and weights are float32, or float64 for a float64 input. ``stats`` describes the last call with tensors on the device:
    ``load`` [E], the tokens of each expert, ``entropy`` [], the mean entropy of the probabilities in nats, and ``dropped`` [], the
    fraction of pairs that exceed the capacity.

    ``balance_loss``, the coefficient of E * sum_e f_e p_e (f the fraction of all pairs, p the mean probability of an expert; 1 when
    balanced; transformers' is k times as large), and ``z_loss``, that of the mean squared logsumexp (Zoph et al., "ST-MoE", 2022),
    are no part of the loss: their gradients are added in the backward pass. They count once for each token, as if the objective, a
    sum over tokens, had a term for each. f is that of all ranks.

    ``bias_update_rate``: Balance without a loss (Wang et al. 2024): after each optimizer step ``update_biases`` moves
    ``e_score_correction_bias`` up for experts with less than the mean load, and down for the others. Each backward pass adds its
    load to ``counts``, which a recomputed forward pass does not repeat, and the sum over all micro-batches and ranks decides: the
    bias is the same for any number of them. Between steps ``counts`` is zero, and no checkpoint stores it.

    Args:
        score: ``softmax`` over all experts; ``sigmoid`` (DeepSeek-V3), where ``groups`` of experts compete first, by the sum of
            their two best scores, and ``top_groups`` remain; ``softmax_after_topk`` (gpt-oss) over the chosen logits; ``sinkhorn``
            (Clark et al. 2022): training chooses by a balanced transport plan without a gradient, evaluation by the logits, since
            there a token must not depend on others; the weight is sigmoid(logit) for k = 1, and by softmax for more.
        normalize: Divide the weights of a token by their sum.
        scale: Factor of the weights.
        correction: Add the buffer ``e_score_correction_bias`` to the scores to choose experts, not to the weights.
    """

    wide = True  # its weights stay in float32
    e_score_correction_bias: Any  # Tensor or None
    counts: Tensor

    def __init__(
        self, channels: int, experts: int, top_k: int, *,
        score: Literal["softmax", "sigmoid", "softmax_after_topk", "sinkhorn"] = "softmax", normalize: bool = True, groups: int = 1,
        top_groups: int = 1, scale: float = 1.0, bias: bool = False, correction: bool = False, balance_loss: float = 0.0,
        z_loss: float = 0.0, bias_update_rate: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        inside = experts // groups
        if experts % groups or inside < 2 <= groups or not (1 <= top_groups <= groups and 1 <= top_k <= inside * top_groups):
            raise ConfigError(
                f"a router chooses {top_k} of {experts} experts, in {top_groups} of {groups} groups: expected equal groups, of two "
                "experts or more if there are several, and no more choices than experts in the groups that remain"
            )
        if score == "sinkhorn" and (balance_loss or groups > 1 or correction):
            raise ConfigError("a Sinkhorn router balances by itself; leave out balance_loss, groups and correction")
        if bias_update_rate and not correction:
            raise ConfigError(f"bias_update_rate is {bias_update_rate:g}, but the router has no correction; set correction")
        self.top_k, self.score, self.normalize, self.scale = top_k, score, normalize, scale
        self.groups, self.top_groups = groups, top_groups
        self.balance_loss, self.z_loss, self.bias_update_rate = balance_loss, z_loss, bias_update_rate
        self.weight = nn.Parameter(torch.empty(experts, channels))
        self.bias = nn.Parameter(torch.empty(experts)) if bias else None
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=torch.float32) if correction else None)
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.all_reduce: nn.Module = Seam()  # sums counts, in place, over ranks with other tokens
        self.copies = 1  # ranks that route the same tokens
        self.stats: dict[str, Tensor] = {}
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(channels**-0.5), channels**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
            experts = self._choose(logits.detach())
            chosen = experts.view(-1)
            counts = torch.zeros_like(self.counts).scatter_add_(0, chosen, torch.ones_like(chosen))  # bincount reads the device
            entropy = torch.special.entr(self.probabilities(logits.detach())).sum(-1).mean()
            self.stats = {"load": counts, "entropy": entropy, "dropped": torch.zeros_like(entropy)}
            if self.training and (self.balance_loss or self.z_loss or self.bias_update_rate):
                logits = _Balance.apply(logits, counts, self)
            return self._weights(logits, experts), experts

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities that the balance loss and the entropy are about.   [N, E] -> [N, E]"""
        if self.score != "sigmoid":
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def penalty(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return balance loss and z-loss, each times the number of tokens, for the ``counts`` [E] of all ranks.   [N, E] -> []"""
        fractions = counts.to(logits.dtype) / counts.sum()
        balance = self.balance_loss * len(counts) * (self.probabilities(logits) * fractions).sum() if self.balance_loss else 0.0
        return balance + self.z_loss * logits.logsumexp(-1).square().sum()

    @torch.no_grad()
    def _choose(self, logits: Tensor) -> Tensor:
        if self.score == "sinkhorn" and self.training:
            return (logits + sinkhorn(logits)).topk(self.top_k)[1]
        scores = logits.sigmoid() if self.score == "sigmoid" else logits
        if self.e_score_correction_bias is not None:
            scores = (scores if self.score == "sigmoid" else logits.softmax(-1)) + self.e_score_correction_bias
        if self.top_groups < self.groups:
            grouped = scores.unflatten(-1, (self.groups, -1))
            best = grouped.topk(2)[0].sum(-1).topk(self.top_groups)[1]
            removed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            scores = grouped.masked_fill(removed[..., None], -math.inf).flatten(-2)
        return scores.topk(self.top_k)[1]

    def _weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        chosen = logits.gather(-1, experts)
        if self.score == "sigmoid" or (self.score == "sinkhorn" and self.top_k == 1):
            weights = chosen.sigmoid()
            if self.normalize and self.score == "sigmoid":
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif self.normalize or self.score == "softmax_after_topk":
            weights = chosen.softmax(-1)  # the softmax over all experts, divided by the sum of the chosen ones
        else:
            weights = logits.softmax(-1).gather(-1, experts)
        return weights if self.scale == 1.0 else weights * self.scale


class _Balance(UntransformedFunction):
    """The identity of ``logits``, whose backward pass adds the gradient of ``Router.penalty`` and counts the load."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, counts: Tensor, router: Router) -> Tensor:
        ctx.router = router
        ctx.save_for_backward(logits, counts)
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (logits, counts), router = ctx.saved_tensors, ctx.router
        if router.bias_update_rate:
            router.counts += counts
        if router.balance_loss or router.z_loss:
            total = router.all_reduce(counts.clone()) if router.balance_loss else counts
            with torch.enable_grad():
                logits = logits.detach().requires_grad_()
                grad = grad + torch.autograd.grad(router.penalty(logits, total), logits)[0] / router.copies
        return grad, None, None


@torch.no_grad()
def update_biases(routers: Sequence[Router]) -> None:
    """Update ``e_score_correction_bias`` of ``routers``, if any, after an optimizer step, with one all-reduce for all of them."""
    if not routers:
        return
    counts = routers[0].all_reduce(torch.cat([router.counts for router in routers]))
    for router, load in zip(routers, counts.split([len(router.counts) for router in routers])):
        router.e_score_correction_bias.add_((load.sum() - load * len(load)).sign(), alpha=router.bias_update_rate)
        router.counts.zero_()


@torch.no_grad()
def sinkhorn(logits: Tensor) -> Tensor:
    """Return the potentials [E] that make exp(logits + potentials), normalised over the experts of each token, equally large in sum
    for each expert: Sinkhorn's iteration in log space, a fixed number of rounds.   [N, E] -> [E]"""
    potentials = logits.new_zeros(logits.shape[-1])
    for _ in range(_SINKHORN_ROUNDS):
        potentials -= (logits + potentials).log_softmax(-1).logsumexp(0)
    return potentials


class Experts(nn.Module):
    """The feed-forward layers of all experts, down(activation(gate(x), up(x))), with stacked weights.

    ``clipped_swiglu`` is that of gpt-oss: (up + 1) gate sigmoid(1.702 gate), with the gate up to 7 and up between -7 and 7.

    Shape: rows [R, C], sorted by expert, and ``counts`` [E], the number of rows of each, or None if all have R/E -> [R, C]
    """

    def __init__(
        self, channels: int, inner: int, experts: int, *, bias: bool = False,
        activation: Literal["swiglu", "clipped_swiglu"] = "swiglu",
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = swiglu if activation == "swiglu" else clipped_swiglu
        for name, outputs, inputs in zip(_PROJECTIONS, (inner, inner, channels), (channels, channels, inner)):
            parameters = {name: (experts, outputs, inputs)} | ({f"{name}_bias": (experts, outputs)} if bias else {})
            for each, size in parameters.items():
                self.register_parameter(each, nn.Parameter(torch.empty(size)))
                nn.init.uniform_(getattr(self, each), -(inputs**-0.5), inputs**-0.5)
        self.has_bias, self.float8_matmul = bias, False
        self.adds_output_bias = True  # on one rank of those that sum their outputs

    def forward(self, rows: Tensor, counts: Tensor | None = None) -> Tensor:
        x, weights = cast_to_autocast(rows), [getattr(self, name) for name in _PROJECTIONS]
        weights = weights if self.float8_matmul else [cast_to_autocast(weight) for weight in weights]
        biases: list[Any] = [cast_to_autocast(getattr(self, f"{name}_bias")) for name in _PROJECTIONS] if self.has_bias else []
        if self.has_bias and not self.adds_output_bias:
            biases[2] = biases[2] * 0.0  # not left out: ranks communicate gradients as they arrive, in the same order
        total = len(weights[0])
        if self.float8_matmul or has_triton_kernel(x) or has_torch_kernel(x, weights[0]):
            counts = torch.full((total,), len(x) // total, device=x.device) if counts is None else counts
            return self._together(x, counts, weights, biases)
        sizes = [len(x) // total] * total if counts is None else self.read_counts(counts, len(x), total)
        return _ExpertLoop.apply(x, sizes, self.activation, *weights, *(biases or [None] * 3))

    @staticmethod
    def read_counts(counts: Tensor, rows: int, experts: int) -> list[int]:
        """Return ``counts`` from the device. ``hpcai plan`` replaces it by the mean load of ``experts`` with ``rows`` in all."""
        return counts.tolist()

    def _together(self, x: Tensor, counts: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        experts = torch.arange(len(counts), device=x.device).repeat_interleave(counts, output_size=len(x))

        def linear(x: Tensor, *projections: int) -> list[Tensor]:
            ys = grouped_linear(x, ends, [weights[number] for number in projections], self.float8_matmul)
            return [y + F.embedding(experts, biases[number]) if biases else y for y, number in zip(ys, projections)]

        return linear(cheap(self.activation, *linear(x, 0, 1)), 2)[0]


def clipped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=_GATE_LIMIT), up.clamp(-_GATE_LIMIT, _GATE_LIMIT)
    return (up + 1) * gate * torch.sigmoid(_GATE_SLOPE * gate)


class _ExpertLoop(UntransformedFunction):
    """One expert after another. The backward pass computes activations again, and writes gradients of stacked weights in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], activation: Any, *parameters: Tensor | None) -> Tensor:
        ctx.counts, ctx.activation = counts, activation
        weights, biases = parameters[:3], parameters[3:]
        gate, up, y = (x.new_empty(len(x), weight.shape[1]) for weight in weights)  # type: ignore[union-attr]
        for e, (x_e, gate_e, up_e, y_e) in enumerate(zip(*(tensor.split(counts) for tensor in (x, gate, up, y)))):
            if not len(x_e):  # as of most experts when one token is generated
                continue
            _linear(x_e, weights[0], biases[0], e, gate_e)
            _linear(x_e, weights[1], biases[1], e, up_e)
            _linear(activation(gate_e, up_e), weights[2], biases[2], e, y_e)
        ctx.save_for_backward(x, gate, up, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate, up, *parameters = ctx.saved_tensors
        weights, dx = parameters[:3], torch.empty_like(x, memory_format=torch.contiguous_format)
        grads = [torch.empty_like(p) if need else None for p, need in zip(parameters, ctx.needs_input_grad[3:])]
        for e, (x_e, gate_e, up_e, dy_e, dx_e) in enumerate(zip(*(tensor.split(ctx.counts) for tensor in (x, gate, up, dy, dx)))):
            with torch.enable_grad():
                inputs = gate_e.detach().requires_grad_(), up_e.detach().requires_grad_()
                hidden = ctx.activation(*inputs)
            dgate, dup = torch.autograd.grad(hidden, inputs, dy_e @ weights[2][e])
            torch.mm(dgate, weights[0][e], out=dx_e).addmm_(dup, weights[1][e])
            for number, (dz, z) in enumerate(((dgate, x_e), (dup, x_e), (dy_e, hidden.detach()))):
                if (dweight := grads[number]) is not None:
                    torch.mm(dz.T, z, out=dweight[e])
                if (dbias := grads[number + 3]) is not None:
                    torch.sum(dz, 0, out=dbias[e])
        return dx, None, None, *grads


def _linear(x: Tensor, weight: Any, bias: Any, e: int, out: Tensor) -> None:
    torch.mm(x, weight[e].T, out=out) if bias is None else torch.addmm(bias[e], x, weight[e].T, out=out)


class RowOrder(NamedTuple):
    """The order of rows by expert."""

    tokens: Tensor
    """[R] the token of each row"""
    rows: Tensor
    """[N, k] the row of each pair of a token and one of its experts"""
    counts: Tensor | None
    """[E] the number of rows of each expert, or None if all have as many"""
    kept: Tensor | None = None
    """[N, k] whether a pair has a row, or None if all have one"""

    @classmethod
    def by_expert(cls, experts: Tensor, counts: Tensor, capacity: int | None) -> "RowOrder":
        """Sort pairs by expert, those of an expert by token. Pairs after the first ``capacity`` of an expert are dropped, and rows
        without a pair are those of the first token, which nothing reads.   experts [N, k], counts [E] of all pairs"""
        chosen, k = experts.reshape(-1), experts.shape[-1]
        order = chosen.argsort(stable=True)
        places = torch.arange(len(order), device=order.device)
        rows = torch.empty_like(order).scatter_(0, order, places)
        if capacity is None:
            return cls(order // k, rows.view_as(experts), counts)
        place = rows - (counts.cumsum(0) - counts)[chosen]
        kept = place < capacity
        rows = torch.where(kept, chosen * capacity + place, len(counts) * capacity)
        tokens = order.new_zeros(len(counts) * capacity + 1).scatter_(0, rows, places // k)[:-1]
        return cls(tokens, rows.where(kept, 0).view_as(experts), None, kept.view_as(experts))

    def mask(self, weights: Tensor) -> Tensor:
        return weights if self.kept is None else weights * self.kept

    def row_index(self) -> Tensor:
        """Return ``rows``, with -1 for pairs without a row."""
        return self.rows if self.kept is None else self.rows.masked_fill(~self.kept, -1)


class Gather(UntransformedFunction):
    """The rows of an order, from tokens. Each row is read once, so that the gradient of a token is a sum over its rows in a fixed
    order, not a scatter.   [N, C] -> [R, C]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum_rows(grad, ctx.order, None), None


class Combine(UntransformedFunction):
    """The weighted sum of the rows of each token.   [R, C], weights [N, k] -> [N, C]"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        return _sum_rows(rows, order, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows, weights), order = ctx.saved_tensors, ctx.order
        if has_triton_kernel(rows):
            from hpcai.kernels import moe_triton

            return *moe_triton.combine_backward(grad, rows, order.row_index(), weights, order.kept is None), None
        # Rows without a pair, and those of dropped pairs, have weight 0.
        of_rows = weights.new_zeros(len(rows)).scatter_add_(0, order.rows.view(-1), order.mask(weights).view(-1))
        drows, dots = grad.index_select(0, order.tokens), torch.empty_like(of_rows)
        step = chunk_size(rows, 4 * rows.shape[-1], _CPU)
        for drow, row, dot, weight in zip(*(tensor.split(step) for tensor in (drows, rows, dots, of_rows))):
            torch.sum(drow * row, -1, dtype=dot.dtype, out=dot)
            drow.mul_(weight[:, None])
        return drows, order.mask(dots[order.rows]), None


def _sum_rows(rows: Tensor, order: RowOrder, weights: Tensor | None) -> Tensor:
    """Return the sum of the rows of each token, with ``weights`` or 1."""
    if has_triton_kernel(rows):
        from hpcai.kernels import moe_triton

        return moe_triton.combine(rows, order.row_index(), weights)
    weights = order.mask(torch.ones_like(order.rows, dtype=rows.dtype) if weights is None else weights)
    return F.embedding_bag(order.rows, rows, mode="sum", per_sample_weights=weights.to(rows.dtype))


class MoE(nn.Module):
    """A mixture of experts, and a shared expert for all tokens, if any, with its own gate, if any.   [B, T, C] -> [B, T, C]

    ``capacity_factor``: Each expert takes N k/E times so many pairs of a call, rounded up, and later ones are dropped; None: all.
    With it all sizes are static under expert parallelism too.
    """

    def __init__(
        self, router: Router, experts: Experts, shared_expert: nn.Module | None = None, shared_expert_gate: nn.Linear | None = None,
        capacity_factor: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate, self.experts = router, experts
        self.shared_expert, self.shared_expert_gate, self.capacity_factor = shared_expert, shared_expert_gate, capacity_factor
        self.exchange: Any = None  # seam of expert parallelism: brings rows to the ranks of their experts, and outputs back
        self.tensor: nn.Module = Seam()  # seam of tensor parallelism: begins with all tokens, and finishes with their outputs

    def forward(self, x: Tensor) -> Tensor:
        pending = self._begin(x)
        shared = None if self.shared_expert is None else self.shared_expert(x)
        if shared is not None and self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        y = self._finish(*pending)
        return y if shared is None else y + shared

    @disable_dynamo
    def _begin(self, x: Tensor) -> tuple[Any, Tensor, RowOrder, torch.Size]:
        full = self.tensor.begin(x)  # type: ignore[operator]
        tokens = full.flatten(0, -2)
        weights, experts = self.gate(tokens)
        load, factor = self.gate.stats["load"], self.capacity_factor
        order = RowOrder.by_expert(experts, load, None if factor is None else math.ceil(experts.numel() / len(load) * factor))
        if order.kept is not None:
            self.gate.stats["dropped"] = 1 - order.kept.to(weights.dtype).mean()
        rows = Gather.apply(cast_to_autocast(tokens), order)
        pending = (rows, order.counts) if self.exchange is None else self.exchange.begin(rows, order)
        return pending, weights, order, full.shape

    @disable_dynamo
    def _finish(self, pending: Any, weights: Tensor, order: RowOrder, shape: torch.Size) -> Tensor:
        outputs = self.experts(*pending) if self.exchange is None else self.exchange.finish(pending, self.experts)
        return self.tensor.finish(Combine.apply(outputs, weights, order).view(shape))  # type: ignore[operator]
