"""Compute OpenFold's features from a chain, its alignment and templates, under AlphaFold's names.

They are a function of (seed, epoch, index). All passes have the same residues and templates, each its own sample of the alignment.
Arrays have the pass as their last dim; in memory it is the first, so that ``array[..., k]`` is contiguous.
R residues of a crop, C clusters, E extra rows, T templates, N residues of the chain, S rows of its alignment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.arrays import to_array
from hpcai.errors import DataError
from hpcai.models.openfold import sampling
from hpcai.models.openfold.alignments import Alignment, check_same_sequence, encode
from hpcai.models.openfold.config import FeatureConfig
from hpcai.models.openfold.residues import GAP, UNKNOWN
from hpcai.models.openfold.structures import Chain
from hpcai.models.openfold.targets import compute_targets, make_atom14_masks, pseudo_beta, torsion_angles

Array = NDArray[Any]

TEMPLATES = "template_aatype", "template_all_atom_positions", "template_all_atom_mask", "template_sum_probs"
_UNUSED_TARGETS = {"torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask"}  # only chi angles are targets


@dataclass(frozen=True, slots=True)
class Templates:
    """``count`` templates, the best first. ``take`` reads only selected ones: indices -> arrays as for ``featurize``."""

    count: int
    take: Callable[[Array], Mapping[str, Array]]


TemplateSource = Mapping[str, Array] | Templates | None


def featurize(
    chain: Chain | str, alignment: Alignment, templates: TemplateSource = None, cfg: FeatureConfig | None = None, *,
    seed: int = 0, epoch: int = 0, index: int = 0, passes: int | None = None, training: bool = True,
) -> dict[str, Array]:  # fmt: skip
    """Return the features of one chain, or of a sequence alone, without a structure. Floats are float32, integers int64.

    templates: ``template_aatype`` [K, N] with gaps, ``template_all_atom_positions`` [K, N, 37, 3] in angstrom and
    ``template_all_atom_mask`` [K, N, 37], ``template_sum_probs`` [K, 1], the best first; see ``read_templates``. In training their
    number, their choice, the crop and the clamping of errors are random; otherwise the best templates and the first residues are
    used. ``passes`` defaults to ``cfg.recycles`` + 1; with fewer, they are the first of these. Raises DataError for arguments that
    do not belong together.
    """
    cfg = cfg or FeatureConfig()
    passes = cfg.recycles + 1 if passes is None else passes
    where, aatype = ("sequence", encode(chain).astype(np.int64)) if isinstance(chain, str) else (chain.name, chain.aatype)
    _check_inputs(where, aatype, alignment)
    if passes < 1:
        raise DataError(f"{where}: {passes} passes, expected at least one")
    generator = _generator(seed, epoch, index, 0)
    size, clamped = cfg.crop or len(aatype), generator.random() < cfg.clamped
    start = int(generator.integers(0, max(len(aatype) - size, 0), endpoint=True)) if training else 0
    crop = slice(start, start + size)
    features: dict[str, Array] = {
        "aatype": aatype,
        "residue_index": np.arange(len(aatype)),
        "seq_mask": np.ones(len(aatype), np.float32),
        "target_feat": sampling.target_feat(aatype),
        **make_atom14_masks(aatype),
    }
    shared: dict[str, Any] = {name: pad_or_crop(array[crop], size) for name, array in features.items()}
    shared["seq_length"] = np.int64(min(len(aatype), size))
    if not isinstance(chain, str):
        targets = compute_targets(aatype, chain.positions, chain.mask, where)
        targets |= {"all_atom_positions": np.where(chain.mask[..., None] > 0, chain.positions, 0), "all_atom_mask": chain.mask}
        shared |= {name: pad_or_crop(array[crop], size) for name, array in targets.items() if name not in _UNUSED_TARGETS}
        shared |= {"resolution": np.float32(chain.resolution or 0), "is_distillation": np.float32(0)}
        shared["use_clamped_fape"] = np.float32(training and clamped)
    if cfg.templates:
        shared |= _template_features(templates, len(aatype), crop, size, cfg, generator if training else None, where)
    profile = sampling.msa_profile(alignment.msa)
    rows = [_msa_rows(alignment, profile, crop, size, cfg, _generator(seed, epoch, index, 1 + k), training) for k in range(passes)]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    stacked |= {name: np.repeat(np.asarray(array)[None], passes, 0) for name, array in shared.items()}
    return {name: np.moveaxis(array, 0, -1) for name, array in stacked.items()}


def _generator(seed: int, epoch: int, index: int, stage: int) -> np.random.Generator:
    """Return the generator of stage 0, for everything shared by passes, or of stage k, for pass k - 1."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch, index), spawn_key=(stage,))))


def _check_inputs(where: str, aatype: Array, alignment: Alignment) -> None:
    msa, deletions = alignment.msa, alignment.deletions
    if not len(aatype):
        raise DataError(f"{where}: no residues, expected at least one; leave it out")
    if aatype.min() < 0 or aatype.max() > UNKNOWN:
        raise DataError(f"{where}: residue types from {aatype.min()} to {aatype.max()}, expected 0 to {UNKNOWN}, without gaps")
    if msa.ndim != 2 or not len(msa):
        raise DataError(f"{where}: an alignment of shape {msa.shape}, expected rows [S, {len(aatype)}], at least the query")
    if msa.shape[1] != len(aatype) or deletions.shape != msa.shape:
        fault = f"{where}: an alignment of {msa.shape} with deletions of {deletions.shape} for {len(aatype)} residues"
        raise DataError(f"{fault}, expected as many columns; is it of another chain?")
    if msa.dtype.kind not in "iu" or msa.min() < 0 or msa.max() > GAP or deletions.min() < 0:
        raise DataError(
            f"{where}: letters {msa.dtype} from {msa.min()} to {msa.max()} and deletions from {deletions.min()} in the alignment; "
            f"expected integers from 0 to {GAP}, and 0 or more"
        )
    check_same_sequence(msa[0], aatype, f"{where}: the first row of the alignment")


def pad_or_crop(array: Array, *sizes: int) -> Array:
    """Crop, or pad with zeros, to ``sizes`` along the first dims."""
    shape = (*sizes, *array.shape[len(sizes) :])[: array.ndim]
    out = np.zeros(shape, array.dtype)
    overlap = tuple(slice(min(pair)) for pair in zip(shape, array.shape))
    out[overlap] = array[overlap]
    return out


def _msa_rows(
    alignment: Alignment, profile: Array, crop: slice, size: int, cfg: FeatureConfig, generator: np.random.Generator, training: bool
) -> dict[str, Array]:
    """Return the alignment features of one pass. Clusters are assigned by full rows, as in the public code; the rest is cropped."""
    rows = np.arange(len(alignment))
    if training and cfg.deleted_blocks:
        rows = sampling.delete_blocks(len(alignment), cfg.deleted_blocks, cfg.deleted_share, generator)
    cluster_rows, extra_rows = (rows[indices] for indices in sampling.choose_clusters(len(rows), cfg.clusters, generator))
    true_msa, extra_msa = alignment.msa[cluster_rows], alignment.msa[extra_rows]
    msa, masked = sampling.mask_msa(true_msa, profile, cfg.mask, generator)
    cluster = sampling.assign_clusters(msa, extra_msa)
    msa, true_msa, masked, extra_msa = (array[:, crop] for array in (msa, true_msa, masked, extra_msa))
    deletions, all_extra_deletions = alignment.deletions[cluster_rows, crop], alignment.deletions[extra_rows, crop]
    summary = sampling.summarize_clusters(msa, deletions, extra_msa, all_extra_deletions, cluster)
    extra, extra_deletions = extra_msa[: cfg.extra], all_extra_deletions[: cfg.extra]  # the others are in random order
    clusters: dict[str, Array] = {
        "msa_feat": sampling.msa_feat(msa, deletions, *summary),
        "true_msa": true_msa.astype(np.int64),
        "bert_mask": masked.astype(np.float32),
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
    features = {name: pad_or_crop(array, cfg.clusters, size) for name, array in clusters.items()}
    return features | {name: pad_or_crop(array, cfg.extra, size) for name, array in extras.items()}


def choose_templates(count: int, max_templates: int, generator: np.random.Generator) -> Array:
    """Return the templates from a random start on, among ``max_templates`` random ones. The start may be the end: often few are
    left, sometimes none.   [0 to ``max_templates``]"""
    selected = generator.permutation(count)[:max_templates]
    return selected[int(generator.integers(0, len(selected), endpoint=True)) :]


def center(positions: Array, mask: Array) -> NDArray[np.float32]:
    """Subtract the mean of a template's atoms, since low precision is exact near 0.   [T, N, 37, 3], [T, N, 37]"""
    known = mask[..., None] > 0
    mean = positions.sum((1, 2), np.float64, where=known) / np.maximum(known.sum((1, 2)), 1)
    return np.where(known, positions - mean[:, None, None], 0).astype(np.float32)


def _template_features(
    source: TemplateSource, length: int, crop: slice, size: int, cfg: FeatureConfig, generator: np.random.Generator | None,
    where: str,
) -> dict[str, Array]:  # fmt: skip
    if not isinstance(source, Templates):
        arrays = dict(zip(TEMPLATES, _validate_templates(source, length, where)))
        aatype, positions, mask, _ = arrays.values()
        for number, template in enumerate(zip(aatype, positions, mask), 1):
            pseudo_beta(*template, f"{where}: template {number}")  # rejects invalid ones, whether they are drawn or not
        source = Templates(len(aatype), lambda indices: {name: array[indices] for name, array in arrays.items()})
    most = cfg.templates
    chosen = choose_templates(source.count, most, generator) if generator is not None else np.arange(source.count)[:most]
    aatype, positions, mask, sum_probs = _validate_templates(source.take(chosen) if len(chosen) else None, length, where)
    # Padding templates have no atoms, and so all their features are 0.
    aatype, mask = pad_or_crop(aatype.astype(np.int64), most), pad_or_crop(mask.astype(np.float32), most)
    positions = center(pad_or_crop(positions, most), mask)
    features = {"aatype": aatype, "all_atom_positions": positions, "all_atom_mask": mask}
    features["pseudo_beta"], features["pseudo_beta_mask"] = pseudo_beta(aatype, positions, mask, where)
    if cfg.torsions:
        names = "torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask"
        features |= zip(names, torsion_angles(aatype, positions, mask, where))
    cropped = {f"template_{name}": pad_or_crop(array[:, crop], most, size) for name, array in features.items()}
    cropped["template_sum_probs"] = pad_or_crop(sum_probs.astype(np.float32), most)
    return cropped | {"template_mask": pad_or_crop(np.ones(len(chosen), np.float32), most)}


def _validate_templates(templates: Mapping[str, Array] | None, length: int, where: str) -> list[Array]:
    """Return the arrays named in TEMPLATES, with shapes that fit the chain."""
    shapes = (length,), (length, 37, 3), (length, 37), (1,)
    if templates is None:
        return [np.zeros((0, *shape), np.int64 if name == TEMPLATES[0] else np.float32) for name, shape in zip(TEMPLATES, shapes)]
    missing = [name for name in TEMPLATES if name not in templates]
    if missing:
        raise DataError(f"{where}: templates without {', '.join(missing)}; expected {', '.join(TEMPLATES)}")
    arrays = [to_array(templates[name], name) for name in TEMPLATES]
    for name, array, shape in zip(TEMPLATES, arrays, shapes):
        if array.shape != (len(arrays[0]), *shape):
            expected = f"{(len(arrays[0]), *shape)} for {len(arrays[0])} templates of {length} residues; are they of another chain?"
            raise DataError(f"{where}: {name} of shape {array.shape}, expected {expected}")
    return arrays


def collate(samples: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Stack samples along a new first dim. Raises DataError, with the name, if shapes or dtypes differ."""
    if not samples:
        raise DataError("a batch of no samples, expected at least one")
    for number, sample in enumerate(samples):
        for name in sorted(samples[0].keys() ^ sample.keys()):
            has, lacks = (0, number) if name in samples[0] else (number, 0)
            raise DataError(f"{name}: sample {has} of the batch has it, sample {lacks} has not; expected the same features in all")
        for name, array in sample.items():
            first = samples[0][name]
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                fault = f"{name}: {array.dtype} {array.shape} in sample {number} and {first.dtype} {first.shape} in sample 0"
                raise DataError(f"{fault}; expected the same crop, rows, templates and passes in all")
    stacks = {name: np.stack([np.moveaxis(sample[name], -1, 0) for sample in samples], 1) for name in samples[0]}
    return {name: np.moveaxis(stack, 0, -1) for name, stack in stacks.items()}
