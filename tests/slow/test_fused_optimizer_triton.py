"""The Triton kernels of optimizers, in Triton's interpreter, agree with their reference in torch."""

import pytest

from tests.slow.programs import run_program

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")

PROGRAM = """
import random, sys, torch
from hpcai.kernels import fused_optimizer, fused_optimizer_triton
from hpcai.kernels.fused_optimizer import Segments, adam_, lamb_direction_, lars_, lars_norms, sgd_, lamb_update_

class TritonOperands(fused_optimizer.Operands):
    def __init__(self, *rows, **after):
        super().__init__(*rows, **after)
        self.triton = fused_optimizer_triton

def check_close(name, actual, expected):
    if actual.dtype != torch.bfloat16:
        torch.testing.assert_close(actual, expected, rtol=4e-6, atol=1e-6, msg=lambda m: f"{name}: {m}")
    else:  # low: the interpreter truncates; moments: equal bitwise unless float32 differs in the last place
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-7)
        assert name == "low" or (actual != expected).float().mean() < 0.02, f"{name}: different bits"

def run_example(r):
    n = r.choice([1, 15, 16, 1000, 1024, 2048, 3000, 5008])
    torch.manual_seed(r.randrange(10**6))
    rows = {"weights": torch.randn(n), "gradient": torch.randn(n) * 0.1, "first": torch.randn(n) * 0.1, "second": torch.rand(n)}
    for name in ("gradient", "first", "second"):
        rows[name] = rows[name].to(r.choice([torch.float32, torch.bfloat16] + [torch.float64] * (name == "gradient")))
    rows |= {"low": r.choice([torch.randn(n).bfloat16(), None]), "average": r.choice([torch.randn(n), None])}
    edges = sorted(r.choices(range(0, n + 1, r.choice([1, 16])), k=2 * r.randint(1, 4)))
    segments = Segments([(a, b - a) for a, b in zip(edges[::2], edges[1::2])], "cpu", n)
    kind = r.choice("adam adamw sgd keras lamb lars".split())
    lr, step = torch.tensor(r.choice([0.0, 1e-3, 0.3])), torch.tensor(r.choice([1.0, 2.0, 4.0, 50.0, 1e5]))
    scale, skip = r.choice([torch.tensor(0.37), torch.tensor(1.0), None]), torch.tensor(r.choice([0.0, 0.0, 0.0, 1.0]))
    rows["gradient"].fill_(torch.nan) if skip else None
    seed, offset = torch.tensor(r.choice([-5, 0, 7, 1 << 40])), r.choice([0, 5, 1 << 31, (1 << 33) + 3])
    decay, momentum, betas = r.choice([0.0, 0.1]), r.choice([0.0, 0.9]), r.choice([(0.9, 0.999), (0.0, 0.5)])
    nesterov = r.choice([True, False])
    take, ratio = torch.tensor(r.choice([1.0, 0.7, 0.5, 0.001])), torch.linspace(0.5, 2, segments.count)

    def run(row_class):
        fused_optimizer.Operands = row_class
        x = {k: None if t is None else t.clone() for k, t in rows.items()}
        after, rng = dict(bf16_copy=x["low"], average=x["average"], average_rate=take), dict(seed=seed, offset=offset)
        w, g, m, v, moments = *list(x.values())[:4], dict(scale=scale, found_inf=skip, weight_decay=decay)
        if kind in ("adam", "adamw"):
            adam_(w, g, m, v, lr=lr, step=step, betas=betas, eps=1e-8, decoupled=kind == "adamw", **moments, **after, **rng)
        elif kind in ("sgd", "keras"):
            sgd_(w, g, m, lr=lr, momentum=momentum, lr_in_momentum=kind == "keras", nesterov=nesterov, **moments, **after, **rng)
        elif kind == "lamb":
            x["direction"] = d = torch.zeros(n)
            x["sums"] = lamb_direction_(w, g, m, v, d, segments, step=step, betas=betas, eps=1e-6, **moments, **rng)
            lamb_update_(w, d, segments, ratio, lr=lr, found_inf=skip, **after)
        else:
            x["sums"] = lars_norms(w, g, segments, scale=scale)
            lars_(w, g, m, segments, ratio, lr=lr, momentum=momentum, **moments, **after, **rng)
        return x

    expected, fused = run(Reference), run(TritonOperands)
    for name, row in expected.items():
        if row is not None and skip and name in rows and name != "gradient":
            assert torch.equal(fused[name], rows[name]), f"{name} changed in a skipped update"
        elif row is not None and not skip:
            check_close(name, fused[name], row)

Reference, r, sums, total = fused_optimizer.Operands, random.Random(int(sys.argv[1])), torch.rand(1500, 2), torch.empty(2, 2)
fused_optimizer_triton.fold[(2,)](sums, torch.tensor([3, 1400, 1500]), total, BLOCK=512)
check_close("total", total, torch.stack([sums[3:1400].sum(0), sums[1400:].sum(0)]))
print(len([run_example(r) for k in range(int(sys.argv[2]))]), "examples")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "examples"), [(1, 50), pytest.param(2, 300, marks=pytest.mark.claim)])
def test_kernels_agree_with_the_reference_over_random_rows_and_options(seed: int, examples: int) -> None:
    assert f"{examples} examples" in run_program(PROGRAM, str(seed), str(examples), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
