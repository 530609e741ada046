"""Small random periodic structures and networks for the DimeNet++ tests."""

from typing import Any

import numpy as np
import torch

from hpcai.models.dimenet import DimeNet, DimeNetConfig, build_structure
from hpcai.models.dimenet.graph import Structure

SMALL = DimeNetConfig(hidden=12, output=10, interaction=6, basis=4, blocks=2, spherical=5, radial=4, cutoff=4.0, most=None)


def random_network(cfg: DimeNetConfig = SMALL, seed: int = 0, dtype: torch.dtype = torch.float64) -> DimeNet:
    """Return a network with random output layers, which a new network initializes to 0."""
    torch.manual_seed(seed)
    model = DimeNet(cfg)
    for output in model.output_blocks:
        torch.nn.init.normal_(output.lin.weight, std=0.5)  # type: ignore[union-attr]
    return model.to(dtype)


def random_crystal(seed: int, count: int = 4) -> tuple[Any, Any, Any]:
    """Return atomic numbers, positions and a skewed cell with close periodic images; some atoms lie outside the cell."""
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(2.8, 4.5, 3)) + rng.uniform(-0.8, 0.8, (3, 3))
    positions = (np.arange(count)[:, None] * np.array([0.5, 0.31, 0.27]) + rng.uniform(0, 0.12, (count, 3)) + [0, -0.4, 1.2]) @ cell
    return rng.integers(1, 60, count), positions, cell


def random_structure(seed: int, cfg: DimeNetConfig = SMALL, count: int = 4) -> Structure:
    numbers, positions, cell = random_crystal(seed, count)
    return build_structure(numbers, positions, cell, cutoff=cfg.cutoff, most=cfg.most)
