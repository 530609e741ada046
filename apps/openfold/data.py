"""Protein chains as samples, and batches of them with the sampled number of passes.   R residues, P passes"""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import date
from functools import partial
from typing import Any

import numpy as np
import torch

from apps.openfold.settings import Config, DataConfig
from data_prep import chains
from hpcai.data import Loader, Rows
from hpcai.data.hdf5 import Fields
from hpcai.data.sampler import LargestFirst, Sampler, Shuffled, Weighted
from hpcai.data.splits import Samples, make_loader, open_loaders, open_split
from hpcai.dist import Mesh
from hpcai.errors import CheckpointError, DataError
from hpcai.models.openfold import Alignment, Chain, FeatureConfig, OpenFold, featurize, load_weights
from hpcai.models.openfold.features import Templates, collate
from hpcai.models.openfold.residues import ATOM37_EXISTS, RESTYPES
from hpcai.models.openfold.structures import write_structure
from hpcai.models.openfold.templates import template_features
from hpcai.nn.weights import set_origin
from hpcai.programs import command_of
from hpcai.train import Run

FIELDS: dict[str, tuple[str, tuple[int | str | None, ...]]] = {
    name: (field.dtype, field.shape) for name, field in chains.FIELDS.items() if name != "cluster"
}
TEMPLATE_FIELDS = {name: FIELDS[name] for name in ("residues", "aatype", "positions", "mask")}

logger = logging.getLogger(__name__)


def build_loaders(cfg: Config, mesh: Mesh) -> AbstractContextManager[tuple[Any, Any, Any]]:
    """Open loaders for training (None on ranks that only evaluate), validation and pictures."""
    data, features = cfg.data, cfg.features
    train, validation = (open_rows(cfg, split, FIELDS, mesh) for split in ("train", "validation"))
    has_templates = (data.directory / "templates").is_dir()
    templates = open_rows(cfg, "templates", TEMPLATE_FIELDS, mesh) if features.templates and has_templates else None
    drawn = Chains(train, _select_released(train, None, data.released_until), features, cfg.train.seed, templates)
    held_rows = _select_released(validation, data.validation_from, data.validation_until)
    held_rows = held_rows[validation.column("residues")[held_rows] <= (data.validation_residues or np.inf)]
    _check_lengths(validation, held_rows, mesh["axial"].size)
    uncropped = features.model_copy(update={"crop": None})
    transform = partial(keep_passes, features.recycles, cfg.train.seed)
    kwargs: dict[str, Any] = {"sampler": _sampler(cfg, drawn), "accumulate": cfg.step.accumulate, "batch_transform": transform}

    def held_out(rows: np.ndarray, name: str) -> Loader:
        """Return a loader of uncropped chains, longest first, each assigned to the least loaded replica."""
        source = Chains(validation, rows, uncropped, cfg.train.seed, templates, training=False)
        sampler = LargestFirst(source.column("residues").astype(float) ** 2, mesh["replicate"].size)
        return make_loader(source, sampler.groups, data, mesh, name=name, sampler=sampler, last_batch="keep")

    few = held_rows[np.linspace(0, len(held_rows) - 1, min(data.pictures, len(held_rows))).round().astype(int)]
    return open_loaders(
        mesh,
        lambda: make_loader(drawn, data.batch, data, mesh, name="train", **kwargs),
        lambda: held_out(held_rows, "validation"),
        (lambda: held_out(few, "pictures")) if len(few) else None,
    )


def _check_lengths(rows: Rows, selected: np.ndarray, ranks: int) -> None:
    """Raise DataError if a full chain is too short to shard over ``ranks`` ranks."""
    residues = rows.column("residues")
    for row in selected[residues[selected] < ranks][:1]:
        location = f"{rows.describe(int(row))}: {residues[row]} residues for the {ranks} ranks of mesh.axial"
        raise DataError(f"{location}; take this chain out, or set mesh.axial to {residues[row]} or less")


def _sampler(cfg: Config, source: "Chains") -> Sampler:
    data, seed = cfg.data, cfg.train.seed
    if data.draw == "once":
        return Shuffled(len(source), seed)
    weights = sampling_weights(source.column("residues"), source.column("cluster_size"))
    return Weighted(weights, data.epoch or len(source), seed, numbered=True)


def open_rows(cfg: Config, split: str, fields: Fields, mesh: Mesh) -> Rows:
    data = cfg.data
    remedy = f"make data with: {command_of('data_prep.openfold')} simulate {data.directory}, or change data.directory"
    return open_split(data.directory / split, fields, remedy, data, mesh)


def _select_released(rows: Rows, first: date | None, last: date | None) -> np.ndarray:
    """Return the rows of chains released between two days, or on an unknown day."""
    day = rows.column("release")
    begin, end = chains.days_since_epoch(first), chains.days_since_epoch(last)
    selected = (day == chains.UNKNOWN_DAY) | ((day >= begin) & ((day <= end) | (last is None)))
    if not selected.all():
        logger.info("%s: %d of %d chains are left out for their day of release", rows.folder.name, (~selected).sum(), len(selected))
    return np.flatnonzero(selected)


def sampling_weights(residues: np.ndarray, cluster_size: np.ndarray) -> np.ndarray:
    """Return the sampling weights of chains: long ones more, those in large clusters less, as in MLPerf HPC.   [N] each"""
    return np.clip(residues, 256, 512) / 512 / np.sqrt(np.maximum(cluster_size, 1))


class Chains(Samples):
    """Chains of a split, a ``subset`` of its rows, with the features of all passes. ``templates``: rows of their template hits.
    In training index i + k * N is a further sample of chain i."""

    replicated = True

    def __init__(
        self, rows: Rows, subset: np.ndarray, cfg: FeatureConfig, seed: int, templates: Rows | None = None, *, training: bool = True
    ) -> None:
        super().__init__(rows)
        if not len(subset):
            raise DataError(f"{rows.folder}: none of {len(rows)} chains is left by the settings of data; change those")
        self.subset, self.cfg, self.seed, self.templates, self.training = subset, cfg, seed, templates, training

    def __len__(self) -> int:
        return len(self.subset)

    def column(self, name: str) -> np.ndarray:
        """[N]"""
        return self.rows.column(name)[self.subset]

    def describe(self, index: int) -> str:
        return self.rows.describe(self._row(index))

    def _row(self, index: int) -> int:
        return int(self.subset[index % len(self)])

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        row = self._row(index)
        values = chains.unflatten(self.rows.read(row), self.rows.describe(row))
        chain, alignment = parse_chain(values)
        # The features of a held-out chain are the same each time.
        number, epoch = (index, epoch) if self.training else (row, 0)
        seed, templates = self.seed, self._templates(values, row)
        features = featurize(chain, alignment, templates, self.cfg, seed=seed, epoch=epoch, index=number, training=self.training)
        features["index"] = np.full(self.cfg.recycles + 1, row)
        return features

    def _templates(self, values: dict[str, Any], row: int) -> Templates | None:
        count, rows = int(values["hits"]), self.templates
        if rows is None or not count:
            return None

        def take(hits: np.ndarray) -> dict[str, np.ndarray]:
            at = values["hit_row"][hits]
            if at.min() < 0 or at.max() >= len(rows):
                location = f"{self.rows.describe(row)}: rows {at.min()} to {at.max()} of {rows.folder}, which has {len(rows)}"
                raise DataError(f"{location}; convert both again with data_prep.openfold")
            return template_features([rows.read(int(k)) for k in at], values["hit_places"][hits], values["hit_sum_probs"][hits])

        return Templates(count, take)

    def close(self) -> None:
        super().close()
        if self.templates is not None:
            self.templates.close()

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in collate(samples).items()}


def parse_chain(values: dict[str, Any]) -> tuple[Chain, Alignment]:
    aatype, mask = values["aatype"].astype(np.int64), values["mask"].astype(np.float32)
    sequence = "".join((RESTYPES + "X")[kind] for kind in aatype)
    name, resolution = values["name"].item().decode(), float(values["resolution"]) or None
    chain = Chain(name, sequence, aatype, values["positions"], mask, np.zeros_like(mask), resolution, None, "")
    return chain, Alignment(values["msa"], values["deletions"], [])


def keep_passes(most: int, seed: int, batch: dict[str, Any], step: int) -> dict[str, Any]:
    """Keep the first passes of a batch, as many as its step samples: the same number on all ranks, and each from 1 to ``most`` + 1
    once in ``most`` + 1 steps."""
    passes = draw_passes(seed, step, most)
    return {name: value[..., :passes] for name, value in batch.items()}


def draw_passes(seed: int, step: int, most: int) -> int:
    """Return the passes of a 0-based step: its recycles, each number of which occurs once in ``most`` + 1 steps, plus one."""
    block, position = divmod(step, most + 1)
    return 1 + int(np.random.default_rng([seed, block]).permutation(most + 1)[position])


def build_model(cfg: Config) -> OpenFold:
    """Build the network, and load the weights of ``cfg.start``. Raises CheckpointError if their hash differs or they do not fit."""
    model, path = OpenFold(cfg.model), cfg.start.weights
    if path is None:
        return model
    if cfg.start.sha256 is not None:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise CheckpointError(f"start.weights: {path}: cannot be read: {problem.strerror}") from problem
        if digest != cfg.start.sha256.lower():
            raise CheckpointError(f"start.weights: {path}: has SHA-256 {digest}, expected {cfg.start.sha256}; fetch it again")
    state = load_weights(path).state_dict()
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        first = str(problem).splitlines()[1].strip()
        raise CheckpointError(f"start.weights: {path}: of another network than the settings of model: {first}") from problem
    set_origin(model, path)
    return model


def save_structures(run: Run, data: DataConfig, predictions: dict[str, torch.Tensor]) -> None:
    """Write ``structures.npz`` for the report, and each predicted chain as structures/NAME.cif with pLDDT as B-factors."""
    if not predictions:  # another rank has them
        return
    rows = Rows(data.directory / "validation", FIELDS, reader="buffered")
    names = [name.decode() for name in rows.column("name")[predictions["index"].numpy()]]
    rows.close()
    arrays = {name: value.numpy() for name, value in predictions.items() if name != "index"}
    run.write_file("structures.npz", lambda path: np.savez_compressed(path, names=np.array(names), **arrays))  # type: ignore[arg-type]
    ends = np.cumsum(arrays["residues"])
    for name, part in zip(names, (slice(end - count, end) for end, count in zip(ends, arrays["residues"]))):
        aatype, positions, confidence = (arrays[kind][part] for kind in ("aatype", "predicted", "plddt"))
        mask = ATOM37_EXISTS[aatype]
        run.write_file(
            f"structures/{name}.cif",
            lambda path, a=aatype, x=positions, m=mask, b=confidence, n=name: write_structure(path, a, x, m, b, name=n),
        )
