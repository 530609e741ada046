"""Scores of generated fields: ensembles, power spectra, one-point distributions and features.

Functions ``*_sums`` return (sums, finish) for evaluations (``train.metrics``): sums are added over batches and ranks, and
``finish(*sums)`` returns scores by name. All is computed in float64.

M ensemble members, B samples, P pixels (any dims), S wave number shells, K bins, N rows of D features
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.errors import DataError

ScoreSums = tuple[tuple[Tensor, ...], Callable[..., Any]]


def crps(members: Tensor, observed: Tensor, fair: bool = False) -> Tensor:
    """Return the continuous ranked probability score of each pixel, in the unit of the field: mean |x - y| - sum |x - x'| / (2 M^2)
    (Gneiting and Raftery 2007); ``fair``: with 2 M (M - 1), unbiased in M (Ferro 2014).   [M, B, P], [B, P] -> [B, P]"""
    x, y = _check_pair(members, observed, 2 if fair else 1)
    m = len(x)
    # The sum over pairs is twice the sum of (2 i - m - 1) times the i-th smallest member.
    rank = torch.arange(1 - m, m, 2, dtype=x.dtype, device=x.device).view(-1, *[1] * y.ndim)
    pairs = (rank * x.sort(0).values).sum(0)
    return (x - y).abs().mean(0) - pairs / (m * (m - 1) if fair else m * m)


def gaussian_crps(mean: Tensor, deviation: Tensor | float, observed: Tensor) -> Tensor:
    """Return the CRPS of normal distributions, such as of a deterministic field dressed with errors (Gneiting et al. 2005, eq. 5).
    [B, P], standard deviation that broadcasts, [B, P] -> [B, P]"""
    z = (observed.double() - mean.double()) / deviation
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return deviation * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))


def mean_sums(name: str, values: Tensor, weights: Tensor | None = None) -> ScoreSums:
    """The mean of ``values``, with ``weights`` that broadcast.   [B, P]"""
    total = torch.ones_like(values) if weights is None else weights.to(values).expand_as(values)
    return (torch.stack(((values * total).sum(), total.sum())),), lambda sums: {name: float(sums[0] / sums[1])}


def ensemble_sums(members: Tensor, observed: Tensor, weights: Tensor | None = None) -> ScoreSums:
    """Ensemble scores, means over samples and pixels: fair ``crps``; ``rmse`` of the ensemble mean; ``spread_over_skill``, the root
    of the mean variance (with M - 1) over ``rmse``, times sqrt((M + 1) / M), which is 1 if members and observation have the same
    distribution (Fortin et al. 2014); ``coverage_90``, the fraction of pixels between the 5 % and 95 % quantiles of the members.
    [M, B, P], [B, P], weights of pixels that broadcast. Raises DataError for one member, or shapes that do not fit."""
    x, y = _check_pair(members, observed, 2)
    weight = torch.ones_like(y) if weights is None else weights.to(y).expand_as(y)
    terms = crps(x, y, fair=True), (x.mean(0) - y).square(), x.var(0), _within_quantiles(x, y, 0.9).to(y), torch.ones_like(y)
    return (torch.stack([(weight * term).sum() for term in terms]),), partial(_finish_ensemble, len(x))


def _finish_ensemble(m: int, sums: Tensor) -> dict[str, float]:
    fair, square, variance, covered = (sums[:4] / sums[4]).tolist()
    ratio = math.sqrt(variance / square) if square else math.inf
    return {"crps": fair, "rmse": math.sqrt(square), "spread_over_skill": ratio * math.sqrt((m + 1) / m), "coverage_90": covered}


def _within_quantiles(x: Tensor, y: Tensor, level: float) -> Tensor:
    """Whether y is within the central interval of the members with probability ``level``, by linearly interpolated quantiles."""
    ordered, bounds = x.sort(0).values, []
    for quantile in ((1 - level) / 2, (1 + level) / 2):
        rank = quantile * (len(x) - 1)
        low = min(int(rank), len(x) - 2)
        bounds.append(torch.lerp(ordered[low], ordered[low + 1], rank - low))
    return (bounds[0] <= y) & (y <= bounds[1])


def rank_histogram(members: Tensor, observed: Tensor) -> Tensor:
    """Return the number of pixels with k members below the observation (Hamill 2001), equal for all k if members and observation
    have the same distribution. If t members equal it, each of its t + 1 possible ranks counts 1 / (t + 1).
    [M, B, P], [B, P] -> [M + 1] float64"""
    x, y = _check_pair(members, observed, 1)
    below, equal = ((x < y).sum(0).flatten(), (x == y).sum(0).flatten())
    ranks = torch.arange(len(x) + 1, device=x.device)[:, None]
    return (((ranks >= below) & (ranks <= below + equal)).to(x.dtype) / (equal + 1)).sum(1)


def _check_pair(members: Tensor, observed: Tensor, least: int) -> tuple[Tensor, Tensor]:
    if members.shape[1:] != observed.shape or len(members) < least or observed.ndim < 1:
        actual = f"members are {list(members.shape)}, observed is {list(observed.shape)}"
        raise DataError(f"scores of an ensemble: {actual}; expected [M, B, ...] with {least} members at least, and [B, ...]")
    return members.double(), observed.double()


class Shells(NamedTuple):
    """Wave number shells of a periodic box, as wide as its smallest wave number, up to the smallest Nyquist wave number."""

    center: Tensor
    """[S] in radians per unit of length"""
    modes: Tensor
    """[S] number of modes"""
    shell: Tensor
    """shell of each mode of ``torch.fft.rfftn``; S: beyond the last"""
    multiplicity: Tensor
    """1 or 2: the mode, and the one of opposite sign that ``rfftn`` leaves out"""
    sizes: tuple[int, ...]
    """cells along each dim"""
    volume: float


def shells(sizes: Sequence[int], lengths: Sequence[float] | float = 1.0, device: torch.device | str | None = None) -> Shells:
    """Return the shells of fields of ``sizes`` cells (1 to 3 dims) in a box of ``lengths``. Raises DataError for other sizes."""
    sides = [float(lengths)] * len(sizes) if isinstance(lengths, int | float) else [float(x) for x in lengths]
    if not 1 <= len(sizes) <= 3 or len(sides) != len(sizes) or min(sizes) < 2 or min(sides) <= 0:
        raise DataError(f"spectrum: {list(sizes)} cells in a box of {sides}; expected 1 to 3 dims of 2 cells, and their lengths")
    kwargs: dict[str, Any] = {"dtype": torch.float64, "device": device}
    last = len(sizes) - 1
    square = torch.zeros((), **kwargs)
    for dim, (n, side) in enumerate(zip(sizes, sides)):
        frequency = (torch.fft.rfftfreq if dim == last else torch.fft.fftfreq)(n, 1 / n, **kwargs) / side
        square = square[..., None] + frequency.square()
    multiplicity = torch.full((sizes[last] // 2 + 1,), 2.0, **kwargs)
    multiplicity[0] = 1.0
    if sizes[last] % 2 == 0:
        multiplicity[-1] = 1.0
    multiplicity = multiplicity.expand(square.shape)
    k, width = 2 * math.pi * square.sqrt(), 2 * math.pi / max(sides)
    # 1e-9: a whole number of widths may be rounded down.
    count = int(min(math.pi * 2 * (n // 2) / side for n, side in zip(sizes, sides)) / width + 1e-9) + 1
    shell = (k / width + 0.5).floor().long().clamp(max=count)
    modes = _sum_by_shell(multiplicity[None], shell, count)[0].round().long()
    return Shells(torch.arange(count, **kwargs) * width, modes, shell, multiplicity, tuple(sizes), math.prod(sides))


def spectrum(fields: Tensor, bins: Shells) -> Tensor:
    """Return the power spectrum P(k) of each field: the volume times the mean squared amplitude of the modes of a shell; shell 0 is
    the mean of the field. The sum over the modes of a shell is P count / volume.   [B, P] -> [B, S] in unit^2 volume"""
    if fields.shape[1:] != bins.sizes:
        raise DataError(f"spectrum: fields are {list(fields.shape)}, but the shells are of samples of {list(bins.sizes)}")
    amplitudes = torch.fft.rfftn(fields.double(), dim=list(range(1, fields.ndim)), norm="forward")
    power = amplitudes.abs().square() * bins.multiplicity  # [B, modes]
    return _sum_by_shell(power, bins.shell, len(bins.modes)) * (bins.volume / bins.modes.double().clamp(min=1))


def spectrum_sums(generated: Tensor, true: Tensor, bins: Shells) -> ScoreSums:
    """``spectrum_error``: the mean of |ln(generated / true)| of mean spectra over all shells but the first.   [B, P] twice, B may
    differ; sums [S + 1] twice"""
    powers = (spectrum(fields, bins) for fields in (generated, true))
    return tuple(torch.cat((power.sum(0), power.new_full((1,), len(power)))) for power in powers), _finish_spectra


def _finish_spectra(generated: Tensor, true: Tensor) -> dict[str, float]:
    p, q = (x[:-1] / x[-1] for x in (generated, true))
    return {"spectrum_error": (p / q).log().abs()[1:].mean().item()}


def _sum_by_shell(values: Tensor, shell: Tensor, count: int) -> Tensor:
    """[B, modes] -> [B, S]"""
    sums = values.new_zeros(len(values), count + 1)
    return sums.index_add_(1, shell.flatten(), values.flatten(1))[:, :count]


def histogram(values: Tensor, edges: Tensor) -> Tensor:
    """Count the values below the first edge, in each bin, and above the last edge. A bin contains its lower edge, the last bin also
    its upper one.   [*], [K + 1] -> [K + 2] int64"""
    x, edge = values.double().flatten(), edges.to(values.device, torch.float64)
    bins = torch.bucketize(x, edge, right=True) - (x == edge[-1]).long()
    return bins.new_zeros(len(edge) + 1).index_add_(0, bins, torch.ones_like(bins))


def one_point_sums(generated: Tensor, true: Tensor, edges: Tensor) -> ScoreSums:
    """``ks``: the largest difference of the distribution functions at the edges, which converges from below to the distance of
    Kolmogorov and Smirnov as bins become small.   sums [K + 2] int64, twice"""
    return (histogram(generated, edges), histogram(true, edges)), _finish_one_point


def _finish_one_point(generated: Tensor, true: Tensor) -> dict[str, float]:
    pdfs = [x / x.sum() for x in (generated.double(), true.double())]
    return {"ks": (pdfs[0] - pdfs[1]).cumsum(0)[:-1].abs().max().item()}


def fid_to_sums(features: Tensor, mean: Tensor, covariance: Tensor) -> ScoreSums:
    """``fid``: the Frechet distance of features, as a normal distribution with unbiased covariance, from given reference moments
    (Heusel et al. 2017).   [N, D], [D], [D, D]; sums [D + 1, D + 1]. ``finish`` raises DataError for fewer than two rows."""
    if features.ndim != 2 or mean.shape != features.shape[1:] or covariance.shape != 2 * mean.shape:
        actual = f"features are {list(features.shape)}, their mean is {list(mean.shape)} and covariance {list(covariance.shape)}"
        raise DataError(f"FID: {actual}; expected [N, D], [D] and [D, D]")
    with_one = torch.cat((features.double(), features.new_ones(len(features), 1).double()), 1)
    return (with_one.T @ with_one,), lambda products: {"fid": frechet(*_moments(products), mean, covariance)}


def _moments(products: Tensor) -> tuple[Tensor, Tensor]:
    n = products[-1, -1]
    if n < 2:
        raise DataError(f"FID: {n:.0f} rows of features; expected two at least, and better thousands")
    mean = products[-1, :-1] / n
    return mean, (products[:-1, :-1] - n * torch.outer(mean, mean)) / (n - 1)


def frechet(a: Tensor, s: Tensor, b: Tensor, t: Tensor) -> float:
    """Return the Frechet distance of two normal distributions (Dowson and Landau 1982).   [D], [D, D], [D], [D, D]"""
    a, s, b, t = (x.to(s.device, torch.float64) for x in (a, s, b, t))
    values, vectors = torch.linalg.eigh(s)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    eigenvalues = torch.linalg.eigvalsh(root @ t @ root)  # the eigenvalues of s t, from a symmetric matrix
    distance = (a - b).square().sum() + s.trace() + t.trace() - 2 * eigenvalues.clamp(min=0).sqrt().sum()
    return distance.item()


def clip_sums(images: Tensor, texts: Tensor) -> ScoreSums:
    """``clip_cosine``: the mean cosine similarity of CLIP embeddings of images and texts, MLPerf's CLIP score.   [N, D] twice"""
    if images.shape != texts.shape or images.ndim != 2:
        raise DataError(f"CLIP: images are {list(images.shape)} and texts {list(texts.shape)}; expected [N, D] of both")
    return mean_sums("clip_cosine", torch.cosine_similarity(images.double(), texts.double()))
