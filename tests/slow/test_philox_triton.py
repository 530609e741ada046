"""The Triton kernels of Philox, in Triton's interpreter, equal their reference in torch."""

import pytest

from tests.slow.programs import run_program

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

PROGRAM = """
import torch
from hpcai.kernels import philox, philox_triton
DTYPES = {"bits": [torch.int64], "uniform": [torch.float32, torch.float64], "normal": [torch.float32, torch.float64]}
def check_equal(kind, actual, expected):
    if kind == "normal":
        double = actual.dtype == torch.float64
        torch.testing.assert_close(actual, expected, rtol=1e-12 if double else 2e-5, atol=1e-12 if double else 2e-6)
    else:
        assert torch.equal(actual, expected), kind
for kind, dtypes in DTYPES.items():
    for dtype in dtypes:
        kwargs = {} if kind == "bits" else {"dtype": dtype}
        make = getattr(philox, kind)
        for key in (2**64 - 5, torch.tensor(-77)):
            for first in (0, 6, 2**34 - 3):  # the last overflows the low word of a counter
                for n in (5, 1100):
                    actual = torch.empty(n, dtype=dtype)
                    upper = (0, 5, 2**64 - 3)[n % 3]
                    philox_triton.run(kind, key, first, upper, actual)
                    check_equal(kind, actual, make(key, first, n, upper=upper, **kwargs))
            positions = torch.randint(0, 2**40, (7, 3))
            actual = torch.empty(7, 3, dtype=dtype)
            philox_triton.run(kind, key, positions, 0, actual)
            check_equal(kind, actual, make(key, positions, **kwargs))
            for count in (1, 3, 530):
                rows = torch.empty(7, 3, count, dtype=dtype)
                philox_triton.run(kind, key, positions, 7, rows)
                check_equal(kind, rows, make(key, positions, count, upper=7, **kwargs))
        keys = torch.randint(-(2**63), 2**63 - 1, (7, 1))
        uppers = torch.randint(-(2**63), 2**63 - 1, (3,))
        philox_triton.run(kind, keys, positions, uppers, rows)
        check_equal(kind, rows, make(keys, positions, 530, upper=uppers, **kwargs))
print("equal")
"""


def test_kernels_equal_the_reference() -> None:
    assert "equal" in run_program(PROGRAM, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
