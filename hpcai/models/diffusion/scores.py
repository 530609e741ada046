"""How good drawn fields are, as members of an ensemble, in their spectra and in their distribution.

Scores of ensembles, spectra, histograms and features are sums over samples that may lie on many processes. Functions that end in
``_sums`` give (sums, finish), as an evaluation takes them (``train.metrics``): sums are added over batches and processes, and
``finish(*sums)`` makes the scores, by name. Everything is computed in float64.

M members of an ensemble, B samples, P places (any dims), S shells of wave numbers, K bins, N rows of D features
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.errors import DataError

ScoreSums = tuple[tuple[Tensor, ...], Callable[..., Any]]


# ---- ensembles


def crps(members: Tensor, observed: Tensor, fair: bool = False) -> Tensor:
    """Continuous ranked probability score of each place, in the unit of the field: mean |x - y| - sum |x - x'| / (2 M^2) (Gneiting
    and Raftery 2007); ``fair``: with 2 M (M - 1), as if of endless members (Ferro 2014).   [M, B, P], [B, P] -> [B, P]"""
    x, y = _check_pair(members, observed, 2 if fair else 1)
    m = len(x)
    # The sum over pairs is twice that of (2 i - m - 1) times member i in order of size.
    rank = torch.arange(1 - m, m, 2, dtype=x.dtype, device=x.device).view(-1, *[1] * y.ndim)
    pairs = (rank * x.sort(0).values).sum(0)
    return (x - y).abs().mean(0) - pairs / (m * (m - 1) if fair else m * m)


def ensemble_sums(members: Tensor, observed: Tensor) -> ScoreSums:
    """Scores of M members against what was observed, means over samples and places: fair ``crps``, ``rmse`` of the members' mean,
    ``spread_over_skill``, the root of the mean variance (of M - 1) over that, times sqrt((M + 1) / M), which is 1 where members and
    observation come from one distribution (Fortin et al. 2014), and ``coverage_90``, the share of places that lies between the
    members' quantiles of 5 and 95 %.   [M, B, P], [B, P]

    Raises DataError for one member, or shapes that do not fit.
    """
    x, y = _check_pair(members, observed, 2)
    each = crps(x, y, fair=True), (x.mean(0) - y).square(), x.var(0), _within_quantiles(x, y, 0.9).to(y), torch.ones_like(y)
    return (torch.stack([value.sum() for value in each]),), partial(_finish_ensemble, len(x))


def _finish_ensemble(m: int, sums: Tensor) -> dict[str, float]:
    fair, square, variance, covered = (sums[:4] / sums[4]).tolist()
    ratio = math.sqrt(variance / square) if square else math.inf
    return {"crps": fair, "rmse": math.sqrt(square), "spread_over_skill": ratio * math.sqrt((m + 1) / m), "coverage_90": covered}


def _within_quantiles(x: Tensor, y: Tensor, share: float) -> Tensor:
    """Whether y lies between the quantiles of the members, interpolated linearly, that leave out the same share on both sides."""
    ordered, bounds = x.sort(0).values, []
    for at in ((1 - share) / 2, (1 + share) / 2):
        place = at * (len(x) - 1)
        low = min(int(place), len(x) - 2)
        bounds.append(torch.lerp(ordered[low], ordered[low + 1], place - low))
    return (bounds[0] <= y) & (y <= bounds[1])


def rank_sums(members: Tensor, observed: Tensor) -> ScoreSums:
    """Rank histogram (Hamill 2001): how often so many members lie below what was observed. A place where t members are equal to it
    counts 1 / (t + 1) in each of the ranks that it may have. ``rank_<k>`` are shares of places, flat where members and observation
    come from one distribution.   [M, B, P], [B, P]; sums [M + 1] float64"""
    x, y = _check_pair(members, observed, 1)
    below, equal = ((x < y).sum(0).flatten(), (x == y).sum(0).flatten())
    ranks = torch.arange(len(x) + 1, device=x.device)[:, None]
    part = ((ranks >= below) & (ranks <= below + equal)).to(x.dtype) / (equal + 1)
    return (part.sum(1),), _finish_ranks


def _finish_ranks(counts: Tensor) -> dict[str, float]:
    return {f"rank_{k}": value for k, value in enumerate((counts / counts.sum()).tolist())}


def _check_pair(members: Tensor, observed: Tensor, least: int) -> tuple[Tensor, Tensor]:
    if members.shape[1:] != observed.shape or len(members) < least or observed.ndim < 1:
        found = f"members are {list(members.shape)}, observed is {list(observed.shape)}"
        raise DataError(f"scores of an ensemble: {found}; expected [M, B, ...] with {least} members at least, and [B, ...]")
    return members.double(), observed.double()


# ---- spectra


class Shells(NamedTuple):
    """Shells of wave numbers of a periodic box, as wide as its smallest wave number; the last one ends below the smallest Nyquist
    number of its dims."""

    center: Tensor
    """[S] in radians over the unit of the box's lengths"""
    mean: Tensor
    """of the wave numbers of its modes [S]"""
    modes: Tensor
    """how many it has [S]"""
    shell: Tensor
    """of each mode, as ``torch.fft.rfftn`` has them; S: beyond the last"""
    multiplicity: Tensor
    """how many modes each of these stands for: itself, and the one of opposite sign"""
    sizes: tuple[int, ...]
    """cells along each dim"""
    volume: float
    """of the box"""


def shells(sizes: Sequence[int], lengths: Sequence[float] | float = 1.0, device: torch.device | str | None = None) -> Shells:
    """Shells of fields of ``sizes`` cells along 1 to 3 dims of a box of ``lengths``. Raises DataError for other dims or lengths."""
    sides = [float(lengths)] * len(sizes) if isinstance(lengths, int | float) else [float(x) for x in lengths]
    if not 1 <= len(sizes) <= 3 or len(sides) != len(sizes) or min(sizes) < 2 or min(sides) <= 0:
        raise DataError(f"spectrum: {list(sizes)} cells in a box of {sides}; expected 1 to 3 dims of 2 cells, and their lengths")
    words: dict[str, Any] = {"dtype": torch.float64, "device": device}
    last = len(sizes) - 1
    square, times = torch.zeros((), **words), torch.ones((), **words)
    for dim, (n, side) in enumerate(zip(sizes, sides)):
        number = (torch.fft.rfftfreq if dim == last else torch.fft.fftfreq)(n, 1 / n, **words) / side
        square = square[..., None] + number.square()
    times = torch.full((sizes[last] // 2 + 1,), 2.0, **words)
    times[0] = 1.0
    if sizes[last] % 2 == 0:
        times[-1] = 1.0
    times = times.expand(square.shape)
    wave, width = 2 * math.pi * square.sqrt(), 2 * math.pi / max(sides)
    # Exact numbers of widths that rounding put below one would lose a shell.
    many = int(min(math.pi * 2 * (n // 2) / side for n, side in zip(sizes, sides)) / width + 1e-9) + 1
    which = (wave / width + 0.5).floor().long().clamp(max=many)
    count, total = (_sum_by_shell(x[None], which, many)[0] for x in (times, times * wave))
    center = torch.arange(many, **words) * width
    return Shells(center, total / count.clamp(min=1), count.round().long(), which, times, tuple(sizes), math.prod(sides))


def spectrum(fields: Tensor, at: Shells) -> Tensor:
    """Power P(k) of each field, the volume times the mean over a shell's modes of the square of their amplitudes; shell 0 is the
    mean's. The sum over a shell's modes is P count / volume.   [B, P] -> [B, S] in squares of the field's unit times volume"""
    modes = _squared_amplitudes(fields, at)
    return _sum_by_shell(modes, at.shell, len(at.modes)) * (at.volume / at.modes.double().clamp(min=1))


def spectrum_sums(drawn: Tensor, true: Tensor, at: Shells) -> ScoreSums:
    """``spectrum_error``, the mean over shells but the first of |ln(drawn / true)| of mean spectra.   [B, P] twice, B may differ;
    sums [S + 1] twice"""
    powers = (spectrum(fields, at) for fields in (drawn, true))
    return tuple(torch.cat((power.sum(0), power.new_full((1,), len(power)))) for power in powers), _finish_spectra


def _finish_spectra(drawn: Tensor, true: Tensor) -> dict[str, float]:
    p, q = (x[:-1] / x[-1] for x in (drawn, true))
    return {"spectrum_error": (p / q).log().abs()[1:].mean().item()}


def _squared_amplitudes(fields: Tensor, at: Shells) -> Tensor:
    """Squares of amplitudes, with those of opposite sign.   [B, modes]"""
    dims = list(range(1, fields.ndim))
    if fields.shape[1:] != at.sizes:
        raise DataError(f"spectrum: fields are {list(fields.shape)}, but the shells were made for samples of {list(at.sizes)}")
    amplitudes = torch.fft.rfftn(fields.double(), dim=dims, norm="forward")
    return amplitudes.abs().square() * at.multiplicity


def _sum_by_shell(values: Tensor, which: Tensor, many: int) -> Tensor:
    """Sums over shells.   [B, modes] -> [B, S]"""
    found = values.new_zeros(len(values), many + 1)
    return found.index_add_(1, which.flatten(), values.flatten(1))[:, :many]


# ---- one-point distributions


def histogram(values: Tensor, edges: Tensor) -> Tensor:
    """Numbers of values below the first edge, in each bin and above the last edge; a bin has its lower edge, the last bin its upper
    one, too.   [*], [K + 1] -> [K + 2] int64"""
    x, at = values.double().flatten(), edges.to(values.device, torch.float64)
    place = torch.bucketize(x, at, right=True) - (x == at[-1]).long()
    return place.new_zeros(len(at) + 1).index_add_(0, place, torch.ones_like(place))


def one_point_sums(drawn: Tensor, true: Tensor, edges: Tensor) -> ScoreSums:
    """``ks``, the largest difference between shares of values of drawn and of true fields below an edge: from below that of
    Kolmogorov and Smirnov as bins become small.   sums [K + 2] int64, twice"""
    return (histogram(drawn, edges), histogram(true, edges)), _finish_one_point


def _finish_one_point(drawn: Tensor, true: Tensor) -> dict[str, float]:
    shares = [x / x.sum() for x in (drawn.double(), true.double())]
    return {"ks": (shares[0] - shares[1]).cumsum(0)[:-1].abs().max().item()}


# ---- features


def fid_to_sums(drawn: Tensor, mean: Tensor, covariance: Tensor) -> ScoreSums:
    """Frechet distance of drawn features as a normal distribution, with a covariance of N - 1, from one that is known by its
    moments, ``fid`` (Heusel et al. 2017); of features that a network of the user's gives.
    [N, D], [D], [D, D]; sums [D + 1, D + 1]

    ``finish`` raises DataError for fewer than two rows.
    """
    if drawn.ndim != 2 or mean.shape != drawn.shape[1:] or covariance.shape != 2 * mean.shape:
        found = f"features are {list(drawn.shape)}, their mean is {list(mean.shape)} and covariance {list(covariance.shape)}"
        raise DataError(f"FID: {found}; expected [N, D], [D] and [D, D]")
    with_one = torch.cat((drawn.double(), drawn.new_ones(len(drawn), 1).double()), 1)
    return (with_one.T @ with_one,), lambda products: {"fid": frechet(*_moments(products), mean, covariance)}


def _moments(products: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance."""
    n = products[-1, -1]
    if n < 2:
        raise DataError(f"FID: {n:.0f} rows of features; give two at least, and better thousands")
    mean = products[-1, :-1] / n
    return mean, (products[:-1, :-1] - n * torch.outer(mean, mean)) / (n - 1)


def frechet(a: Tensor, s: Tensor, b: Tensor, t: Tensor) -> float:
    """Frechet distance of two normal distributions by their means and covariances (Dowson and Landau 1982).
    [D], [D, D], [D], [D, D]"""
    a, s, b, t = (x.to(s.device, torch.float64) for x in (a, s, b, t))
    values, vectors = torch.linalg.eigh(s)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    middle = torch.linalg.eigvalsh(root @ t @ root)  # those of s t, whose root is asked for, and symmetric
    distance = (a - b).square().sum() + s.trace() + t.trace() - 2 * middle.clamp(min=0).sqrt().sum()
    return distance.item()


def clip_sums(images: Tensor, texts: Tensor) -> ScoreSums:
    """Agreement of images with their texts by the cosine between a CLIP model's embeddings of both: ``clip_cosine``, its mean,
    which MLPerf calls CLIP score; ``clip_score``, the mean of max(100 cos, 0); ``clip_score_of_mean``, max(100 mean, 0);
    ``clip_s``, the mean of 2.5 max(cos, 0) (Hessel et al. 2021).   [N, D] twice"""
    if images.shape != texts.shape or images.ndim != 2:
        raise DataError(f"CLIP: images are {list(images.shape)} and texts {list(texts.shape)}; expected [N, D] of both")
    x, y = (torch.nn.functional.normalize(z.double(), dim=1) for z in (images, texts))
    cosine = (x * y).sum(1)
    return (torch.stack((cosine.sum(), cosine.clamp(min=0).sum(), cosine.new_full((), len(cosine)))),), _finish_clip


def _finish_clip(sums: Tensor) -> dict[str, float]:
    mean, positive = (sums[:2] / sums[2]).tolist()
    return {"clip_cosine": mean, "clip_score": 100 * positive, "clip_score_of_mean": max(100 * mean, 0.0), "clip_s": 2.5 * positive}
