"""Fused optimizer steps equal torch's optimizers and their formulas in float64."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels.fused_optimizer import Segments, adam_, lamb_direction_, lamb_update_, lars_, lars_norms, sgd_, trust_ratio
from tests.cpu_graph import NoHostRead

SIZES = st.sampled_from([1, 15, 16, 17, 1000, 262_143, 262_144, 262_145, 600_000])
BETAS = {"betas": (0.9, 0.999), "eps": 1e-8}
RANGES = [(0, 0), (3, 5), (8, 0), (8, 1), (16, 300_000), (300_016, 0), (300_020, 100)]  # padding before, between and after
N = 300_130


def rand(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def segment_squares(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([torch.stack([row[a : a + b].square().sum() for row in (x, y)]) for a, b in RANGES])


def per_element(ratio: Tensor) -> Tensor:
    factors = torch.ones(N, dtype=torch.float64)
    for (a, b), r in zip(RANGES, ratio):
        factors[a : a + b] = r
    return factors


def scalars(lr: float = 0.1, scale: float = 1.0, found_inf: float = 0.0) -> dict[str, Tensor]:
    return {name: torch.tensor(x) for name, x in (("lr", lr), ("scale", scale), ("found_inf", found_inf))}


@given(n=SIZES, decoupled=st.booleans(), fused=st.booleans())
def test_adam_equals_torch_over_50_steps(n: int, decoupled: bool, fused: bool) -> None:
    parameter = torch.nn.Parameter(rand(n))
    optimizer_class, w, m, v = torch.optim.AdamW if decoupled else torch.optim.Adam, rand(n), torch.zeros(n), torch.zeros(n)
    hyperparameters = {**BETAS, **scalars(3e-3)}
    lr = torch.tensor(3e-3) if fused else float(torch.tensor(3e-3))  # the same float32 value
    optimizer = optimizer_class([parameter], lr=lr, weight_decay=0.1, fused=fused, foreach=False)
    for step in range(1, 51 if n < 1001 else 4):
        parameter.grad = rand(n, step)
        optimizer.step()
        adam_(w, rand(n, step), m, v, step=torch.tensor(float(step)), weight_decay=0.1, decoupled=decoupled, **hyperparameters)
    if fused:
        assert torch.equal(w, parameter) and torch.equal(m, optimizer.state[parameter]["exp_avg"]), "torch's fused update"
    torch.testing.assert_close(w, parameter.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(v, optimizer.state[parameter]["exp_avg_sq"], rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_and_lars_follow_their_formulas_with_padding_and_empty_segments(dtype: torch.dtype) -> None:
    tolerance = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-7}
    segments, s = Segments(RANGES, "cpu", N), scalars(0.125, 0.5)
    w, g, m, v = rand(N, 1, dtype), rand(N, 2, dtype), rand(N, 3, dtype), rand(N, 4, dtype).abs()
    w[16:200_000] *= 3
    w[8] = 0  # a full parameter
    old, g64, direction = w.double().clone(), 0.5 * g.double(), torch.empty_like(w)
    m64, v64 = 0.9 * m.double() + 0.1 * g64, 0.99 * v.double() + 0.01 * g64**2
    u = m64 / (1 - 0.9**3) / ((v64 / (1 - 0.99**3)).sqrt() + 1e-6) + 0.05 * old
    sums = lamb_direction_(w, g, m, v, direction, segments, step=torch.tensor(3.0), scale=s["scale"], found_inf=s["found_inf"],
                           betas=(0.9, 0.99), eps=1e-6, weight_decay=0.05)  # fmt: skip
    expected = segment_squares(old, u)
    torch.testing.assert_close(sums.double(), expected, rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(direction.double(), u, **tolerance)
    ratio = trust_ratio(sums, weight_decay=0.05)
    assert ratio[[0, 2, 3, 5]].tolist() == [1, 1, 1, 1] and abs(ratio[4] - expected[4, 0].sqrt() / expected[4, 1].sqrt()) < 1e-5
    lamb_update_(w, direction, segments, ratio, lr=s["lr"], found_inf=s["found_inf"])
    torch.testing.assert_close(w.double(), old - 0.125 * per_element(ratio) * u, **tolerance)

    old, velocity = w.double().clone(), m.clone()
    norms = lars_norms(w, g, segments, scale=s["scale"])
    torch.testing.assert_close(norms.double(), expected := segment_squares(old, g64), rtol=4e-6, atol=1e-6)
    ratio = trust_ratio(norms, weight_decay=0.05, coefficient=0.02, lars=True)
    a, b = expected[4].sqrt()
    assert ratio[[0, 2, 5]].tolist() == [1, 1, 1] and abs(ratio[4] - 0.02 * a / (b + 0.05 * a)) < 1e-7
    lars_(w, g, velocity, segments, ratio, momentum=0.9, weight_decay=0.05, **s)
    new = 0.9 * m.double() + 0.125 * per_element(ratio) * (g64 + 0.05 * old)
    torch.testing.assert_close(velocity.double(), new, **tolerance)
    torch.testing.assert_close(w.double(), old - new, **tolerance)


@given(n=SIZES, average_decay=st.sampled_from([0.0, 0.3, 0.5, 0.999]), bf16_gradient=st.booleans())
def test_average_bf16_copy_and_scale(n: int, average_decay: float, bf16_gradient: bool) -> None:
    g = rand(n, 2, torch.bfloat16 if bf16_gradient else torch.float32)
    before, w, average, expected, bf16_copy = g.clone(), rand(n), rand(n, 5), rand(n, 5), torch.zeros(n, dtype=torch.bfloat16)
    sgd_(w, g, None, momentum=0.0, weight_decay=0.0, lr_in_momentum=False, bf16_copy=bf16_copy, average=average,
         average_rate=torch.tensor(1 - average_decay), **scalars(0.1, 0.3))  # fmt: skip
    torch.testing.assert_close(w, rand(n) - 0.1 * 0.3 * g.float(), rtol=1e-6, atol=3e-7)
    assert torch.equal(bf16_copy, w.bfloat16()) and torch.equal(g, before)
    torch.testing.assert_close(average, expected.lerp_(w, 1 - average_decay), rtol=1e-6, atol=5e-7)


def run_all_updates(x: dict[str, Tensor], g: Tensor, s: dict[str, Tensor], average_rate: Tensor) -> None:
    n, step, fixed, rounds = len(g), torch.tensor(2.0), {"weight_decay": 0.1}, {"seed": torch.tensor(7)}
    copies, skip = {"bf16_copy": x["low"], "average": x["average"], "average_rate": average_rate}, {"found_inf": s["found_inf"]}
    segments = Segments([(0, n // 2), (n // 2 + 1, 3)], "cpu", n)
    with NoHostRead():
        for decoupled in (True, False):
            adam_(x["w"], g, x["m"], x["v"], step=step, decoupled=decoupled, **BETAS, **fixed, **copies, **rounds, **s)
        for inside in (True, False):
            sgd_(x["w"], g, x["m"], momentum=0.9, lr_in_momentum=inside, **fixed, **copies, **rounds, **s)
        sums = lamb_direction_(x["w"], g, x["m"], x["v"], torch.empty(n), segments, step=step, **BETAS, **fixed, **rounds, **skip,
                               scale=s["scale"])  # fmt: skip
        lamb_update_(x["w"], x["direction"], segments, trust_ratio(sums, weight_decay=0.1), lr=s["lr"], **copies, **skip)
        ratio = trust_ratio(lars_norms(x["w"], g, segments, scale=s["scale"]), weight_decay=0.1, lars=True)
        lars_(x["w"], g, x["m"], segments, ratio, momentum=0.9, **fixed, **copies, **rounds, **s)


@pytest.mark.parametrize("average_decay", [0.3, 0.999])
def test_a_skipped_update_changes_no_bit_without_synchronisation(average_decay: float) -> None:
    n, average_rate = 300_000, torch.tensor(1 - average_decay)
    x = {name: rand(n, k) for k, name in enumerate(("w", "average", "direction"))}  # all different, so that any write is detected
    x |= {name: rand(n, k).abs().bfloat16() for k, name in enumerate(("m", "v", "low"), 3)}
    for row in x.values():
        row[:3] = torch.tensor([-0.0, torch.inf, torch.nan])
    before = copy.deepcopy(x)
    run_all_updates(x, torch.full((n,), torch.nan), scalars(scale=torch.inf, found_inf=1.0), average_rate)
    for name, row in x.items():
        assert torch.equal(row.view(torch.int16), before[name].view(torch.int16)), name
    run_all_updates(x, rand(n, 9), scalars(), average_rate)
    for name in ("w", "average", "m", "v", "low"):
        assert (x[name] != before[name]).float().mean() > 0.2, f"{name} is written when not skipped"


@given(split=st.integers(1, 299_999), seed=st.sampled_from([0, 1, -3, 1 << 50]), start=st.sampled_from([0, 5, (1 << 32) - 1000]))
def test_a_shard_draws_the_random_bits_of_the_flat_parameter(split: int, seed: int, start: int) -> None:
    n, fixed = 300_000, {"step": torch.tensor(1.0), "weight_decay": 0.0, "seed": torch.tensor(seed), **BETAS, **scalars()}
    full, g = [rand(n), *(torch.zeros(n, dtype=torch.bfloat16) for _ in "mv")], rand(n, 2)
    shards, repeated = ([row.clone() for row in full] for _ in "pa")
    adam_(full[0], g, *full[1:], offset=start, **fixed)
    adam_(repeated[0], g, *repeated[1:], offset=start, **fixed)
    for part in (slice(0, split), slice(split, n)):
        adam_(shards[0][part], g[part], *(row[part] for row in shards[1:]), offset=start + part.start, **fixed)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(full, shards, repeated))


def test_stochastic_rounding_is_unbiased_and_independent_from_step_to_step_and_moment_to_moment() -> None:
    n, value = 1_000_000, 1.0 + 0.3 * 2**-7  # three tenths of the way from 1 to the next bfloat16
    ups = []
    for seed in (1, 2):
        m, v, g = torch.zeros(n).bfloat16(), torch.zeros(n).bfloat16(), torch.full((n,), value)
        adam_(torch.zeros(n), g, m, v, step=torch.tensor(1.0), weight_decay=0.0, betas=(0.0, 0.0), eps=1.0,
              seed=torch.tensor(seed), **scalars())  # fmt: skip
        ups += [(m > 1).double() - 0.3, (v > 1).double() - (value**2 - 1) * 2**7]
        assert set(m.tolist()) == {1.0, 1.0 + 2**-7}
        assert abs(m.double().mean() - value) < 5 * 2**-7 * (0.21 / n) ** 0.5
        assert abs(v.double().mean() - value**2) < 5 * 2**-7 * (0.25 / n) ** 0.5
    ups += [ups[0].roll(1), ups[0].roll(1024)]
    assert torch.corrcoef(torch.stack(ups)).fill_diagonal_(0).abs().max() < 5 / n**0.5
    m[:], g[:4] = 0, torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38])
    g[:1].view(torch.int32).fill_(0x7FFFFFFF)  # the NaN that overflows into -0
    sgd_(torch.zeros(n), g, m, momentum=0.9, weight_decay=0.0, lr_in_momentum=True, seed=torch.tensor(1), **scalars(1.0))
    assert m[0].isnan() and m[1] == torch.inf and m[2] == -torch.inf and m[3] > 3e38


def test_invalid_operands_raise() -> None:
    s, w, moment = {"momentum": 0.9, "weight_decay": 0.0, "lr_in_momentum": True, **scalars()}, rand(4), rand(4).bfloat16()
    for match, call in {
        r"segment 1 is \(3, 2\), expected a start from 4": lambda: Segments([(0, 4), (3, 2)], "cpu"),
        r"need a seed": lambda: sgd_(w, w, moment, **s),
        r"gradient is torch.float32 \[3\]": lambda: sgd_(w, rand(3), w.clone(), **s),
        r"average needs average_rate": lambda: sgd_(w, w, w.clone(), average=w.clone(), **s),
    }.items():
        with pytest.raises(ConfigError, match=match):
            call()
