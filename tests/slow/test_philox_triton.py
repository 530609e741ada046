"""The Triton kernels of Philox: run by Triton's interpreter they are the plain-torch twin."""


import pytest

from tests.slow.programs import run

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

TWIN = """
import torch
from hpcai.kernels import philox, philox_triton
DTYPES = {"bits": [torch.int64], "uniform": [torch.float32, torch.float64], "normal": [torch.float32, torch.float64]}
def same(kind, found, expected):
    if kind == "normal":
        wide = found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-12 if wide else 2e-5, atol=1e-12 if wide else 2e-6)
    else:
        assert torch.equal(found, expected), kind
for kind, dtypes in DTYPES.items():
    for dtype in dtypes:
        words = {} if kind == "bits" else {"dtype": dtype}
        make = getattr(philox, kind)
        for key in (2**64 - 5, torch.tensor(-77)):
            for first in (0, 6, 2**34 - 3):  # the last goes on where the low word of a counter ends
                for n in (5, 1100):
                    found = torch.empty(n, dtype=dtype)
                    upper = (0, 5, 2**64 - 3)[n % 3]
                    philox_triton.run(kind, key, first, upper, found)
                    same(kind, found, make(key, first, n, upper=upper, **words))
            places = torch.randint(0, 2**40, (7, 3))
            found = torch.empty(7, 3, dtype=dtype)
            philox_triton.run(kind, key, places, 0, found)
            same(kind, found, make(key, places, **words))
            for count in (1, 3, 530):
                rows = torch.empty(7, 3, count, dtype=dtype)
                philox_triton.run(kind, key, places, 7, rows)
                same(kind, rows, make(key, places, count, upper=7, **words))
        keys = torch.randint(-(2**63), 2**63 - 1, (7, 1))
        uppers = torch.randint(-(2**63), 2**63 - 1, (3,))
        philox_triton.run(kind, keys, places, uppers, rows)
        same(kind, rows, make(keys, places, 530, upper=uppers, **words))
print("the same")
"""


def test_kernels_give_the_numbers_of_the_twin() -> None:
    assert "the same" in run(TWIN, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
