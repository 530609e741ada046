"""CosmoFlow: cosmological parameters from the matter distribution of a universe (Mathuriya et al., SC18, arXiv:1808.04728).

The network is that of MLPerf HPC v1.0 and later; parameter names are those of the public PyTorch submissions.
B batch, C redshifts, D H W the cube, P parameters, F filters of the last block.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.arrays import describe_fill_values, to_array, warn
from hpcai.errors import ConfigError, DataError
from hpcai.models.cosmoflow.config import CosmoFlowConfig
from hpcai.nn.conv import Conv3d, channels_last
from hpcai.nn.inference import inference_mode
from hpcai.nn.weights import PretrainedMixin

NEGATIVE_SLOPE = 0.3  # Keras's default for leaky ReLU, not torch's 0.01
MAX_COUNT = 1e13  # counts in a cell, more than the particles of any simulation so far
MAX_MEAN, MAX_DEVIATION = 1.0, 3.0  # of whitened universes, 0 and 1 in training; with redshifts in reverse order 2 and 4.8


class Block(nn.Module):
    """Convolution, max-pooling, leaky ReLU.   [B, C, D, H, W] -> [B, O, D/2, H/2, W/2]"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv3d(inputs, outputs, 3, padding=1)
        self.pool = nn.MaxPool3d(2)

    def forward(self, x: Tensor) -> Tensor:
        # Leaky ReLU is monotonic and so commutes with max-pooling: it is applied to 1/8 of the cells.
        return F.leaky_relu(self.pool(self.conv(x)), NEGATIVE_SLOPE)


class CosmoFlow(PretrainedMixin):
    """Maps [B, C, D, H, W] log(1 + counts) to [B, P] parameters scaled to [-1, 1]. Weights and activations are channels-last."""

    package = __package__
    mean: Tensor | None  # [C]
    mix: Tensor | None  # [C, C]

    def __init__(self, cfg: CosmoFlowConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or CosmoFlowConfig()
        widths = [cfg.channels] + [cfg.filters << i for i in range(cfg.blocks)]
        self.conv_seq = nn.Sequential(*(Block(i, o) for i, o in pairwise(widths)))
        self.gather_volume: nn.Module = nn.Identity()  # seam: the dense layers need the full cube
        self.dense1 = nn.Linear(widths[-1] * cfg.edge**3, 128)
        self.dense2 = nn.Linear(128, 64)
        self.output = nn.Linear(64, len(cfg.parameters))
        self.replicated_output: nn.Module = nn.Identity()  # seam: the output of ranks that share a cube, counted once
        for layer in self.modules():
            if isinstance(layer, (nn.Conv3d, nn.Linear)):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        # Not persistent, since they follow from the settings: the keys of a checkpoint are those of the benchmark.
        for name, values in (("mean", cfg.mean), ("mix", cfg.mix)):
            self.register_buffer(name, None if values is None else torch.tensor(values), persistent=False)
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is not None and self.mix is not None:
            with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):  # small differences of large numbers
                x = ((x.permute(0, 2, 3, 4, 1) - self.mean) @ self.mix).permute(0, 4, 1, 2, 3)
        x = self.gather_volume(self.conv_seq(channels_last(x)))
        x = x.permute(0, 2, 3, 4, 1).flatten(1)  # [B, D*H*W*F]: Keras's order, and the order in memory
        x = F.dropout(F.leaky_relu(self.dense1(x), NEGATIVE_SLOPE), self.cfg.dropout, self.training)
        x = F.dropout(F.leaky_relu(self.dense2(x), NEGATIVE_SLOPE), self.cfg.dropout, self.training)
        return self.replicated_output(torch.tanh(self.output(x)) * 1.2)

    def predict(self, volume: Any) -> dict[str, Any]:
        """Return the cosmological parameters of one universe or several, by name, in physical units (``model.cfg.units``).

        ``volume`` contains particle counts per cell, [D, H, W, C] or [N, D, H, W, C] (the layout of the public data), as an array
        or a tensor. Returns floats for one universe, arrays [N] for several. Raises DataError for a wrong shape or dtype or invalid
        counts, ConfigError if the outputs of the model have no physical range. Logs a warning for universes unlike the training's.
        """
        cfg, counts = self.cfg, _to_tensor(volume)
        is_single, shape = counts.ndim == 4, list(counts.shape)
        counts = counts[None] if is_single else counts
        expected = (cfg.size, cfg.size, cfg.size, cfg.channels)
        if counts.ndim != 5 or tuple(counts.shape[1:]) != expected:
            raise DataError(f"volume has shape {shape}; expected {list(expected)} (D, H, W, redshifts), or a batch of them")
        if len(bad := counts[~((counts >= 0) & (counts <= MAX_COUNT))]):
            fault = f"{bad[0].item():g}, one of {len(bad):,} invalid values{describe_fill_values(bad.cpu())}"
            raise DataError(f"volume contains {fault}; expected particle counts per cell, 0 to {MAX_COUNT:g}")
        if cfg.low is None or cfg.high is None:
            raise ConfigError("this model has no physical range of its parameters; construct it with cfg.low and cfg.high")
        self._check_likeness(counts)
        weight = self.output.weight
        with inference_mode(self, weight) as dtype:
            scaled = self(log_density(counts.to(weight.device), dtype)).double().cpu()
        physical = to_physical(scaled, cfg).numpy()
        return {name: float(column[0]) if is_single else column for name, column in zip(cfg.parameters, physical.T)}

    def _check_likeness(self, counts: Tensor) -> None:
        """Log a warning for densities and logarithms. With a whitened input, whose statistics are settings, also for redshifts in
        another order.   [N, D, H, W, C]"""
        if self.mean is not None and self.mix is not None:
            cells = counts[:, ::2, ::2, ::2].to(self.mean).log1p()  # 1/8 of the cells
            white = ((cells - self.mean) @ self.mix).flatten(1, 3)
            mean, deviation = float(white.mean(1).abs().max()), float(white.std(1).max())
            if mean > MAX_MEAN or deviation > MAX_DEVIATION:
                text = "volume: log(1 + counts), whitened, has mean %.2g and deviation %.2g; expected 0 and 1 as in training, "
                warn(text + "of counts of particles, with redshifts in the same order", mean, deviation)
        elif counts.is_floating_point() and len(fractions := counts[counts != counts.round()]):
            warn("volume contains %.6g; expected whole numbers of particles; is it a density or a logarithm?", fractions[0].item())


def _to_tensor(volume: Any) -> Tensor:
    """Convert an array to a tensor, in a dtype of torch and native byte order."""
    counts = volume.detach() if isinstance(volume, Tensor) else to_array(volume, "volume")
    if isinstance(counts, np.ndarray) and counts.dtype.kind in "biuf" and counts.dtype.itemsize <= 8:
        counts = torch.from_numpy(np.ascontiguousarray(counts, np.promote_types(counts.dtype, np.int16)))
    if not isinstance(counts, Tensor) or counts.is_complex():
        raise DataError(f"volume is of dtype {counts.dtype}; expected particle counts in at most 64 bits")
    return counts


def log_density(counts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return log(1 + counts), the input of the network.   [B, D, H, W, C] -> [B, C, D, H, W], a view of channels-last memory"""
    return counts.to(dtype, copy=True).log1p_().permute(0, 4, 1, 2, 3)


def to_physical(scaled: Tensor, cfg: CosmoFlowConfig) -> Tensor:
    """Convert outputs in [-1, 1] to physical units.   [..., P] -> [..., P]"""
    if cfg.low is None or cfg.high is None:
        raise ConfigError("the settings have no physical range; set low and high")
    low, high = torch.tensor(cfg.low, dtype=torch.float64), torch.tensor(cfg.high, dtype=torch.float64)
    return low + (scaled.double() + 1) / 2 * (high - low)
