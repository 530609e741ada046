"""Small structures for tests: no science in them, but every kind of neighbour."""

from typing import Any

import numpy as np
import torch

from hpcai.models.dimenet import DimeNet, DimeNetConfig, build_structure
from hpcai.models.dimenet.graph import Structure

SMALL = DimeNetConfig(hidden=12, output=10, interaction=6, basis=4, blocks=2, spherical=5, radial=4, cutoff=4.0, most=None)


def network(cfg: DimeNetConfig = SMALL, seed: int = 0, dtype: torch.dtype = torch.float64) -> DimeNet:
    """With something to say: a new network's last weights are 0."""
    torch.manual_seed(seed)
    model = DimeNet(cfg)
    for output in model.output_blocks:
        torch.nn.init.normal_(output.lin.weight, std=0.5)  # type: ignore[union-attr]
    return model.to(dtype)


def crystal(seed: int, count: int = 4) -> tuple[Any, Any, Any]:
    """Numbers, positions and a skewed cell whose images are near, atoms partly outside of it."""
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(2.8, 4.5, 3)) + rng.uniform(-0.8, 0.8, (3, 3))
    places = (np.arange(count)[:, None] * np.array([0.5, 0.31, 0.27]) + rng.uniform(0, 0.12, (count, 3)) + [0, -0.4, 1.2]) @ cell
    return rng.integers(1, 60, count), places, cell


def structure(seed: int, cfg: DimeNetConfig = SMALL, count: int = 4) -> Structure:
    numbers, positions, cell = crystal(seed, count)
    return build_structure(numbers, positions, cell, cutoff=cfg.cutoff, most=cfg.most)
