"""Judge images that a model draws for captions, such as MLPerf's 30,000 of COCO:

    python -m apps.diffusion score weights=RUN captions=FILE model=PIPELINE features=PACKAGE.MODULE:NAME statistics=FILE clip=FOLDER

``fid``: how far the features of the images are, as a distribution, from those of true ones (Heusel et al. 2017). ``clip_cosine``:
how well each image agrees with its caption, by a CLIP. What FID and CLIP are measured by is the user's: a network that gives
features, their statistics over true images, the folder of a CLIP. Captions are shared out among copies of the model
(``mesh.replicate``); an image depends on the seed and the number of its caption alone. With ``checkpoints=true`` all checkpoints
that the run has kept are judged, and the MLPerf log of a run that has ended is told.

B captions, L channels of a latent, h w its places
"""

import csv
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import model_validator

from apps.diffusion.mlperf import BENCHMARKS
from apps.diffusion.settings import AxesConfig, Config
from hpcai import config, log
from hpcai.config import PositiveInt, Settings
from hpcai.errors import ConfigError, DataError, HpcaiError
from hpcai.mllog import judge_checkpoint
from hpcai.models.diffusion import SamplerConfig

logger = logging.getLogger(__name__)
_COLUMN = "caption"  # of a table of captions
_SEAL = re.compile(r" [0-9a-f]{12}$")  # of a network's weights, after its name
_TOLD = 10  # times at which it is told how far judging has come


class ScoreConfig(Settings):
    """Images that are drawn, and the networks that judge them."""

    weights: Path = Path("runs/sd2")
    """folder of a run, or safetensors file of ours"""
    checkpoints: bool = False
    """whether all checkpoints that the run has kept are judged, in order, in place of what it has left for people"""
    captions: Path | None = None
    """a caption on each line; of .tsv and .csv the column "caption" """
    count: PositiveInt | None = None
    """the first of them alone; null: all"""
    model: Path | None = None
    """pipeline of diffusers: its folders vae, text_encoder, tokenizer ...; or its parts:"""
    vae: Path | None = None
    """the autoencoder that made the latents"""
    tokens: Path | None = None
    """encoder of captions whose last hidden states the model was trained with"""
    pooled: Path | None = None
    """encoder of captions whose pooled output it was trained with"""
    long: Literal["refuse", "cut"] = "refuse"
    """what is done with captions that are too long for the encoder; a CLIP that judges sees the beginning of each"""
    features: str | None = None
    """package.module:name of what makes, when it is called, a torch module: images [B, 3, H, W] from 0 to 1 -> features [B, F]"""
    statistics: Path | None = None
    """.npz with mean `mu` and covariance `sigma` of the features of true images"""
    clip: Path | None = None
    """folder of a CLIP as transformers has it"""
    batch: PositiveInt = 8
    """images that a copy of the model draws together"""
    seed: int = 0
    """of the noise that images begin with"""
    sampler: SamplerConfig | None = None
    """how images are drawn; null: as the model's own settings say"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """of weights and of what is computed until there are images; auto: bf16 on a GPU that is fast with it"""
    mesh: AxesConfig = AxesConfig()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.captions is None:
            raise ValueError("captions is null; name a file with a caption on each line")
        if self.model is None and self.vae is None:
            raise ValueError("neither model nor vae is given, and no latent becomes an image; name a pipeline or an autoencoder")
        if self.model is not None and (self.vae or self.tokens or self.pooled):
            raise ValueError("model is given beside vae, tokens or pooled; name a whole pipeline, or its parts")
        if (self.features is None) != (self.statistics is None):
            raise ValueError("features and statistics go together: name both, for FID, or neither")
        if self.features is None and self.clip is None:
            raise ValueError("nothing judges the images: give features and statistics, for FID, or clip")
        if self.features is not None and not all(self.features.partition(":")):
            raise ValueError(f"features is {self.features!r}; expected package.module:name")
        return self


def run(words: Sequence[str]) -> None:
    """Judge by what the words of a command line say."""
    sys.argv[1:] = list(words)
    config.run(ScoreConfig, main)


def main(cfg: ScoreConfig) -> None:
    from hpcai import dist

    with dist.start(cfg.mesh) as mesh:
        log.setup(mesh.job.rank, mesh.job.size)
        begun = Judging(cfg, mesh)
        for one in weights_of(cfg, mesh):
            found = begun.score(one.path)
            if mesh.is_first:
                at = "" if one.step is None else f"step {one.step:<8}"
                for name, value in found.items():
                    print(f"{at}{name:20}{value:,}" if isinstance(value, int) else f"{at}{name:20}{value:.6g}", flush=True)
                note(cfg.weights, one, found)


# ---- which weights


class Weights(NamedTuple):
    path: Path
    step: int | None = None
    saved: float | None = None
    """when the checkpoint was whole, in seconds since 1970"""


def weights_of(cfg: ScoreConfig, mesh: Any) -> Iterator[Weights]:
    """What is to be judged. Of a checkpoint the first process exports the weights into a file in the run's folder, which goes once
    they are judged. Raises DataError for a run without checkpoints, or whose events do not tell of one."""
    from hpcai.dist.collectives import broadcast_object
    from hpcai.train.checkpoint_reader import export, list_checkpoints, step_number

    if not cfg.checkpoints:
        yield Weights(cfg.weights)
        return
    times = {event["step"]: event["time"] for event in log.read_metrics(cfg.weights / log.METRICS) if event["kind"] == "checkpoint"}
    every = broadcast_object(list_checkpoints(cfg.weights / "checkpoints") if mesh.is_first else [], mesh.peers)
    if not every or (unknown := [path for path in every if step_number(path) not in times]):
        what = f"{unknown[0]}: not in {log.METRICS}" if every else f"{cfg.weights}: has no checkpoint"
        raise DataError(f"{what}; give weights=RUN of a run that has kept some, or leave checkpoints out")
    path = cfg.weights / ".judged.safetensors"
    try:
        for checkpoint in every:
            problem = ""
            try:
                if mesh.is_first:
                    export(checkpoint, path)
            except (HpcaiError, OSError) as error:
                problem = str(error)
            if problem := broadcast_object(problem, mesh.peers):
                raise DataError(problem)
            yield Weights(path, step_number(checkpoint), times[step_number(checkpoint)])
    finally:
        if mesh.is_first:
            path.unlink(missing_ok=True)


def note(folder: Path, one: Weights, found: dict[str, float]) -> None:
    """Tell the MLPerf log of a run in ``folder`` what a checkpoint is worth, where the benchmark has such goals and the run has
    ended. Where it cannot be told, a warning says why."""
    path = folder / "mlperf.log"
    if one.step is None or one.saved is None or not path.is_file():
        return
    benchmark = BENCHMARKS.get(config.load(Config, folder / "settings.yaml", []).benchmark or "")
    if benchmark is None or not benchmark.goals:
        return
    if missing := [goal.label for goal in benchmark.goals if goal.metric not in found]:
        logger.warning("%s: not told of step %d, for which %s is not known", path, one.step, missing[0])
        return
    try:
        reached = judge_checkpoint(path, benchmark, one.step, one.saved, found, int(found["captions"]))
    except DataError as problem:  # such as that the run goes on
        logger.warning("step %d: %s", one.step, problem)
        return
    wanted = " and ".join(f"{goal.label} {goal.target:g}" for goal in benchmark.goals)
    logger.info("%s: step %s %s %s", path, one.step, "reaches" if reached else "does not reach", wanted)


# ---- captions


def captions_of(path: Path, count: int | None = None) -> list[str]:
    """Raises DataError, which names the line, for a caption that is missing."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as text ({problem})") from problem
    if path.suffix in (".tsv", ".csv"):
        rows = csv.DictReader(text.splitlines(), delimiter="\t" if path.suffix == ".tsv" else ",")
        if _COLUMN not in (rows.fieldnames or ()):
            raise DataError(f"{path}: its columns are {', '.join(rows.fieldnames or ('none',))}; expected one named {_COLUMN}")
        found = [(row[_COLUMN] or "").strip() for row in rows]
    else:
        found = [line.strip() for line in text.splitlines()]
    found = found[:count]
    if not found or not all(found):
        where = f"row {found.index('') + 1} has" if found else "there is"
        raise DataError(f"{path}: {where} no caption; expected one in each")
    return found


# ---- images and their scores


class Judging:
    """The networks that are the same for all weights."""

    def __init__(self, cfg: ScoreConfig, mesh: Any) -> None:
        from apps.diffusion.judges import Clip, Features, statistics
        from data_prep import encoders
        from hpcai.dist.collectives import broadcast_object
        from hpcai.train.auto_settings import has_fast_bf16

        assert cfg.captions is not None
        mesh.check_axes("score", "replicate", "tensor")
        self.cfg, self.mesh = cfg, mesh
        self.captions: list[str] = broadcast_object(captions_of(cfg.captions, cfg.count) if mesh.is_first else [], mesh.peers)
        on_gpu = mesh.device.type == "cuda"
        self.narrow = cfg.precision == "bf16" or (cfg.precision == "auto" and on_gpu and has_fast_bf16(mesh.device))
        self.true = None if cfg.statistics is None else statistics(cfg.statistics)
        self.features = None if cfg.features is None else Features(cfg.features, mesh.device)
        self.clip = None if cfg.clip is None else Clip(cfg.clip, mesh.device)
        precision = "bfloat16" if self.narrow else "float32"
        asked = encoders.resolve_networks(cfg.model, cfg.vae, cfg.tokens, cfg.pooled, None, cfg.long == "cut", precision,
                                          str(mesh.device))  # fmt: skip
        self.opened = encoders.load_networks(asked)

    def score(self, path: Path) -> dict[str, float]:
        """All scores of the model at ``path``, the same on all processes."""
        import torch

        from hpcai.train.metrics import MetricSums

        model, copies, measured = self.model(path), self.mesh["replicate"], MetricSums()
        mine = range(copies.rank, len(self.captions), copies.size)
        some = max(1, len(mine) // _TOLD)
        for at in range(0, len(mine), self.cfg.batch):
            numbers = mine[at : at + self.cfg.batch]
            with torch.no_grad():
                images = self.images(model, numbers)
                measured.add(self.judged(images, [self.captions[number] for number in numbers]), len(numbers))
            done = at + len(numbers)
            if done // some > at // some:
                logger.info("%s: %d of %d captions", path, min(done * copies.size, len(self.captions)), len(self.captions))
        return measured.reduce(copies, self.mesh.device, uneven=True) | {"captions": len(self.captions)}

    def model(self, path: Path) -> Any:
        """Over the mesh. Raises ConfigError for one whose samples are no images, or that was trained with other networks."""
        import torch

        from hpcai.models.diffusion import Diffusion, DiffusionConfig, load_deferred, parallelize
        from hpcai.nn.deferred_init import deferred, materialize
        from hpcai.nn.weights import read_settings

        file = path / "model.safetensors" if path.is_dir() else path
        settings = read_settings(file, "diffusion", DiffusionConfig)
        if settings is None or settings.latents is None:
            raise ConfigError(f"{file}: its samples are no latents, of which images are made; give weights of a model of latents")
        self._fits(file, settings)
        with deferred():
            model = load_deferred(Diffusion(settings), path, partial(parallelize, mesh=self.mesh))
        return materialize(model, self.mesh.device, dtype=torch.bfloat16 if self.narrow else torch.float32).eval()

    def _fits(self, file: Path, settings: Any) -> None:
        latents, vae, texts = settings.latents, self.opened.vae, self.opened.text_encoders
        if vae is None or vae.cfg.latents != settings.size[0]:
            found = "no autoencoder" if vae is None else f"latents of {vae.cfg.latents} channels"
            raise ConfigError(f"{self.opened.cfg.vae}: {found}; {file} makes latents of {settings.size[0]}, by {latents.vae}")
        for name in ("tokens", "pooled"):
            wanted = getattr(latents, name)
            if wanted is None:
                continue
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            size = tuple(texts[name].shape) if name in texts else None
            if size != wanted:
                told = f"no encoder of {name}" if size is None else f"{texts[name].folder}: {name} {list(size)}"
                asked = f"{list(wanted)} of {', '.join(latents.encoders)}"
                raise ConfigError(f"{told}; {file} was trained with {asked}: name that one")
        self._same(file, latents)

    def _same(self, file: Path, latents: Any) -> None:
        """Data that came with latents or vectors do not say by which networks these were made."""
        known = [one for one in (latents.vae, *latents.encoders) if _SEAL.search(one)]
        if not known:
            return
        vae, encoders = self.opened.cfg.identities()
        found = [one for one in (vae, *encoders) if one is not None]
        if missing := [one for one in known if one[-12:] not in {other[-12:] for other in found}]:
            raise ConfigError(f"{file} was trained with {missing[0]}, found are {', '.join(found)}; name the folder of that one")

    def images(self, model: Any, numbers: Sequence[int]) -> Any:
        """From 0 to 1, as files of 8 bits have them.   [B, 3, H, W]"""
        import torch

        from hpcai.models.diffusion import Condition

        captions = [self.captions[number] for number in numbers]
        named = [f"{self.cfg.captions}: caption {number + 1}" for number in numbers]
        told = {name: encoder.encode(captions, named)[0] for name, encoder in self.opened.text_encoders.items()
                if getattr(model.cfg.latents, name)}  # fmt: skip
        with torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=self.narrow):
            drawn = model.sample(Condition(**told), seed=self.cfg.seed, sampler=self.cfg.sampler, indices=torch.tensor(numbers))[0]
        latents = drawn.float() / model.cfg.latents.scale + model.cfg.latents.shift
        images = self.opened.decode(latents).to(self.mesh.device) / 2 + 0.5
        if not images.isfinite().all():
            raise DataError("images have numbers that are not finite; look at the weights, or set precision to fp32")
        return (images * 255).round() / 255

    def judged(self, images: Any, captions: Sequence[str]) -> dict[str, Any]:
        """Sums of scores."""
        from hpcai.models.diffusion import scores

        found: dict[str, Any] = {}
        if self.features is not None and self.true is not None:
            found["fid"] = scores.fid_to_sums(self.features(images), *self.true)
        if self.clip is not None:
            found["clip"] = scores.clip_sums(self.clip.images(images), self.clip.texts(captions))
        return found

