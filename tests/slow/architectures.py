"""The generations of GPUs that kernels are compiled for ahead of time: A100, H100 and H200, B200. `make test` takes the second."""

import pytest

ARCHITECTURES = [("90", "sm_90a"), *(pytest.param(*x, marks=pytest.mark.claim) for x in (("80", "sm_80"), ("100", "sm_100a")))]
