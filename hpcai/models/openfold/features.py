"""The features that OpenFold reads, from a chain, its alignment and templates, under the names that AlphaFold gives them.

All is a function of (seed, epoch, index). Every pass sees the same residues and templates, and its own sample of the alignment.
Arrays have the pass as their last dim; in memory one pass lies after another, so that ``array[..., k]`` is in one piece.
R residues of a crop, C clusters, E extra rows, T templates, N residues of the chain, S rows of its alignment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hpcai.config import NonNegativeInt, PositiveInt, Rate, Settings, UnitInterval
from hpcai.errors import ConfigError, DataError
from hpcai.models.openfold import sampling
from hpcai.models.openfold.alignments import Alignment, agree, encode
from hpcai.models.openfold.residues import GAP, UNKNOWN
from hpcai.models.openfold.sampling import MaskConfig
from hpcai.models.openfold.structures import Chain
from hpcai.models.openfold.truth import atom14, pseudo_beta, torsions, truth_of

Array = NDArray[Any]

TEMPLATES = "template_aatype", "template_all_atom_positions", "template_all_atom_mask", "template_sum_probs"
_NOT_READ = {"torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask"}  # only the chain's chi angles are


class FeatureConfig(Settings):
    """How much of a chain the network sees. The defaults are those of MLPerf HPC; the public OpenFold trains with 128 clusters and
    5 deleted blocks."""

    crop: PositiveInt | None = 256
    """residues that are seen, null for all; shorter chains are padded"""
    clusters: PositiveInt = 124
    """rows of the alignment in the main stack; those of templates come on top"""
    extra: NonNegativeInt = 1024
    """further rows of the alignment"""
    templates: NonNegativeInt = 4
    """the most of them that are seen"""
    torsions: bool = True
    """whether torsion angles of templates are seen"""
    recycles: NonNegativeInt = 3
    """the most of them; passes are one more"""
    mask: MaskConfig = MaskConfig()
    clamped: UnitInterval = 0.9
    """share of training samples whose backbone error is clamped"""
    deleted_blocks: NonNegativeInt = 0
    """blocks of neighbouring rows that the alignment loses in training"""
    deleted_share: Rate = 0.3
    """share of all rows that one such block holds"""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Settings by name: ``initial`` or ``finetuning`` (of training), or ``evaluation`` of whole chains as MLPerf HPC has it."""
        presets: dict[str, dict[str, Any]] = {
            "initial": {},
            "finetuning": {"crop": 384, "clusters": 508, "extra": 5120},
            "evaluation": {"crop": None},
        }
        if name not in presets:
            raise ConfigError(f"there is no preset {name!r} of features; expected one of {', '.join(presets)}")
        return cls.model_validate(presets[name] | changes)


@dataclass(frozen=True, slots=True)
class Templates:
    """``count`` templates, the best first, of which ``take`` reads those that are used: indices -> arrays as for ``featurize``."""

    count: int
    take: Callable[[Array], Mapping[str, Array]]


Given = Mapping[str, Array] | Templates | None


def featurize(
    chain: Chain | str, alignment: Alignment, templates: Given = None, cfg: FeatureConfig | None = None, *,
    seed: int = 0, epoch: int = 0, index: int = 0, passes: int | None = None, training: bool = True,
) -> dict[str, Array]:  # fmt: skip
    """Features of one chain, which may be a sequence alone, without a structure. Floats are float32, integers int64.

    templates: ``template_aatype`` [K, N] with gaps, ``template_all_atom_positions`` [K, N, 37, 3] in angstrom and
    ``template_all_atom_mask`` [K, N, 37], ``template_sum_probs`` [K, 1], the best first; see ``read_templates``. Training draws
    how many of them are seen, and which, the residues of a crop and whether errors are clamped; otherwise the best templates and
    the first residues are taken. ``passes`` is one more than ``cfg.recycles`` if it is not given; fewer are the first of them.
    Raises DataError for parts that do not belong together.
    """
    cfg = cfg or FeatureConfig()
    passes = cfg.recycles + 1 if passes is None else passes
    where, aatype = ("sequence", encode(chain).astype(np.int64)) if isinstance(chain, str) else (chain.name, chain.aatype)
    _check(where, aatype, alignment)
    if passes < 1:
        raise DataError(f"{where}: {passes} passes, expected one at least")
    draw = _generator(seed, epoch, index, 0)
    size, clamped = cfg.crop or len(aatype), draw.random() < cfg.clamped
    first = int(draw.integers(0, max(len(aatype) - size, 0), endpoint=True)) if training else 0
    seen = slice(first, first + size)
    fixed = _residues(aatype, seen, size)
    if not isinstance(chain, str):
        found = truth_of(aatype, chain.positions, chain.mask, where)
        found |= {"all_atom_positions": np.where(chain.mask[..., None] > 0, chain.positions, 0), "all_atom_mask": chain.mask}
        fixed |= {name: fit(array[seen], size) for name, array in found.items() if name not in _NOT_READ}
        fixed |= {"resolution": np.float32(chain.resolution or 0), "is_distillation": np.float32(0)}
        fixed["use_clamped_fape"] = np.float32(training and clamped)
    if cfg.templates:
        fixed |= _templates(templates, len(aatype), seen, size, cfg, draw if training else None, where)
    column = sampling.profile(alignment.msa)
    rows = [_rows(alignment, column, seen, size, cfg, _generator(seed, epoch, index, 1 + k), training) for k in range(passes)]
    parts = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    parts |= {name: np.repeat(np.asarray(array)[None], passes, 0) for name, array in fixed.items()}
    return {name: np.moveaxis(array, 0, -1) for name, array in parts.items()}


def _generator(seed: int, epoch: int, index: int, stage: int) -> np.random.Generator:
    """Stage 0 draws what all passes share, stage k for pass k - 1."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch, index), spawn_key=(stage,))))


def _check(where: str, aatype: Array, alignment: Alignment) -> None:
    msa, deletions = alignment.msa, alignment.deletions
    if not len(aatype):
        raise DataError(f"{where}: no residues, expected one at least; leave it out")
    if aatype.min() < 0 or aatype.max() > UNKNOWN:
        raise DataError(f"{where}: residue types from {aatype.min()} to {aatype.max()}, expected 0 to {UNKNOWN}, without gaps")
    if msa.ndim != 2 or not len(msa):
        raise DataError(f"{where}: an alignment of shape {msa.shape}, expected rows [S, {len(aatype)}], the query at least")
    if msa.shape[1] != len(aatype) or deletions.shape != msa.shape:
        raise DataError(
            f"{where}: an alignment of {msa.shape} with deletions of {deletions.shape} for {len(aatype)} residues, expected "
            "as many columns; is it of another chain?"
        )
    if msa.dtype.kind not in "iu" or msa.min() < 0 or msa.max() > GAP or deletions.min() < 0:
        raise DataError(
            f"{where}: letters {msa.dtype} from {msa.min()} to {msa.max()} and deletions from {deletions.min()} in the alignment; "
            f"expected integers from 0 to {GAP}, and 0 or more"
        )
    agree(msa[0], aatype, f"{where}: the first row of the alignment")


def fit(array: Array, *sizes: int) -> Array:
    """Cut, or padded with zeros, to ``sizes`` along the first dims."""
    shape = (*sizes, *array.shape[len(sizes) :])[: array.ndim]
    found = np.zeros(shape, array.dtype)
    both = tuple(slice(min(pair)) for pair in zip(shape, array.shape))
    found[both] = array[both]
    return found


def _residues(aatype: Array, seen: slice, size: int) -> dict[str, Any]:
    """The features that every sequence has."""
    length = len(aatype)
    found = {
        "aatype": aatype,
        "residue_index": np.arange(length),
        "seq_mask": np.ones(length, np.float32),
        "target_feat": sampling.target_feat(aatype),
        **atom14(aatype),
    }
    return {name: fit(array[seen], size) for name, array in found.items()} | {"seq_length": np.int64(min(length, size))}


# ---- the alignment


def _rows(
    alignment: Alignment, column: Array, seen: slice, size: int, cfg: FeatureConfig, draw: np.random.Generator, training: bool
) -> dict[str, Array]:
    """The alignment in one pass. Rows are compared whole, as in the public code; all else comes from the residues that are seen."""
    kept = np.arange(len(alignment))
    if training and cfg.deleted_blocks:
        kept = sampling.spare(len(alignment), cfg.deleted_blocks, cfg.deleted_share, draw)
    chosen, rest = (kept[rows] for rows in sampling.choose(len(kept), cfg.clusters, draw))
    true, other = alignment.msa[chosen], alignment.msa[rest]
    msa, hidden = sampling.hide(true, column, cfg.mask, draw)
    cluster = sampling.nearest(msa, other)
    msa, true, hidden, other = (array[:, seen] for array in (msa, true, hidden, other))
    deletions, other_deletions = alignment.deletions[chosen, seen], alignment.deletions[rest, seen]
    summary = sampling.summarise(msa, deletions, other, other_deletions, cluster)
    extra, extra_deletions = other[: cfg.extra], other_deletions[: cfg.extra]  # the others are in random order
    clusters: dict[str, Array] = {
        "msa_feat": sampling.msa_feat(msa, deletions, *summary),
        "true_msa": true.astype(np.int64),
        "bert_mask": hidden.astype(np.float32),
        "msa_mask": np.ones(msa.shape, np.float32),
        "msa_row_mask": np.ones(len(msa), np.float32),
    }
    extras: dict[str, Array] = {
        "extra_msa": extra.astype(np.int64),
        "extra_has_deletion": sampling.has_deletion(extra_deletions),
        "extra_deletion_value": sampling.deletion_value(extra_deletions),
        "extra_msa_mask": np.ones(extra.shape, np.float32),
        "extra_msa_row_mask": np.ones(len(extra), np.float32),
    }
    found = {name: fit(array, cfg.clusters, size) for name, array in clusters.items()}
    return found | {name: fit(array, cfg.extra, size) for name, array in extras.items()}


# ---- templates


def choose_templates(count: int, most: int, draw: np.random.Generator) -> Array:
    """The templates from a random start on, among ``most`` random ones. The start may be the end: often few are left, sometimes
    none.   [0 to ``most``]"""
    some = draw.permutation(count)[:most]
    return some[int(draw.integers(0, len(some), endpoint=True)) :]


def centred(positions: Array, mask: Array) -> NDArray[np.float32]:
    """Positions less the mean of a template's atoms: numbers of few bits are exact near 0.   [T, N, 37, 3], [T, N, 37]"""
    there = mask[..., None] > 0
    mean = positions.sum((1, 2), np.float64, where=there) / np.maximum(there.sum((1, 2)), 1)
    return np.where(there, positions - mean[:, None, None], 0).astype(np.float32)


def _templates(
    given: Given, length: int, seen: slice, size: int, cfg: FeatureConfig, draw: np.random.Generator | None, where: str,
) -> dict[str, Array]:  # fmt: skip
    if not isinstance(given, Templates):
        every = dict(zip(TEMPLATES, _given(given, length, where)))
        aatype, positions, mask, _ = every.values()
        for number, template in enumerate(zip(aatype, positions, mask), 1):
            pseudo_beta(*template, f"{where}: template {number}")  # refuses bad ones, whether they are drawn or not
        given = Templates(len(aatype), lambda some: {name: array[some] for name, array in every.items()})
    most = cfg.templates
    chosen = choose_templates(given.count, most, draw) if draw is not None else np.arange(given.count)[:most]
    aatype, positions, mask, sum_probs = _given(given.take(chosen) if len(chosen) else None, length, where)
    # The places of templates that are not there are without atoms, and all that follows from these is 0.
    aatype, mask = fit(aatype.astype(np.int64), most), fit(mask.astype(np.float32), most)
    positions = centred(fit(positions, most), mask)
    found = {"aatype": aatype, "all_atom_positions": positions, "all_atom_mask": mask}
    found["pseudo_beta"], found["pseudo_beta_mask"] = pseudo_beta(aatype, positions, mask, where)
    if cfg.torsions:
        names = "torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask"
        found |= zip(names, torsions(aatype, positions, mask, where))
    whole = {f"template_{name}": fit(array[:, seen], most, size) for name, array in found.items()}
    whole["template_sum_probs"] = fit(sum_probs.astype(np.float32), most)
    return whole | {"template_mask": fit(np.ones(len(chosen), np.float32), most)}


def _given(given: Mapping[str, Array] | None, length: int, where: str) -> list[Array]:
    """The arrays that TEMPLATES names, with shapes that fit the chain."""
    tails = (length,), (length, 37, 3), (length, 37), (1,)
    if given is None:
        return [np.zeros((0, *tail), np.int64 if name == TEMPLATES[0] else np.float32) for name, tail in zip(TEMPLATES, tails)]
    lacking = [name for name in TEMPLATES if name not in given]
    if lacking:
        raise DataError(f"{where}: templates without {', '.join(lacking)}; expected {', '.join(TEMPLATES)}")
    arrays = [np.asarray(given[name]) for name in TEMPLATES]
    for name, array, tail in zip(TEMPLATES, arrays, tails):
        if array.shape != (len(arrays[0]), *tail):
            raise DataError(
                f"{where}: {name} of shape {array.shape}, expected {(len(arrays[0]), *tail)} for {len(arrays[0])} templates of "
                f"{length} residues; are they of another chain?"
            )
    return arrays


# ---- batches


def collate(samples: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Samples side by side, a dim of them in front. Raises DataError, with the name, where one differs in shape or type."""
    if not samples:
        raise DataError("a batch of no samples, expected one at least")
    for number, sample in enumerate(samples):
        for name in sorted(samples[0].keys() ^ sample.keys()):
            has, lacks = (0, number) if name in samples[0] else (number, 0)
            raise DataError(f"{name}: sample {has} of the batch has it, sample {lacks} has not; expected the same features in all")
        for name, array in sample.items():
            first = samples[0][name]
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                raise DataError(
                    f"{name}: {array.dtype} {array.shape} in sample {number} and {first.dtype} {first.shape} in sample 0; "
                    "expected the same crop, rows, templates and passes in all"
                )
    stacks = {name: np.stack([np.moveaxis(sample[name], -1, 0) for sample in samples], 1) for name in samples[0]}
    return {name: np.moveaxis(stack, 0, -1) for name, stack in stacks.items()}
