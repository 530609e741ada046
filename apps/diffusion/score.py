"""Evaluate images that a model generates for captions, such as MLPerf's 30,000 of COCO:

    python -m apps.diffusion score weights=RUN captions=FILE model=PIPELINE features=PACKAGE.MODULE:NAME statistics=FILE clip=FOLDER

``fid``: the Frechet distance between the features of the images and of true ones (Heusel et al. 2017). ``clip_cosine``: the
agreement of each image with its caption, by a CLIP. The user provides the networks: one for features, statistics of these over true
images, and the folder of a CLIP. Captions are distributed over model replicas (``mesh.replicate``); an image depends only on the
seed and the number of its caption. ``checkpoints=true`` evaluates all checkpoints that the run has kept, and appends the results to
the MLPerf log of a run that has ended.

B captions, L channels of a latent, h w its pixels
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
from hpcai.errors import ConfigError, DataError
from hpcai.mllog import judge_checkpoint
from hpcai.models.diffusion import SamplerConfig

logger = logging.getLogger(__name__)
_COLUMN = "caption"  # of a table of captions
_DIGEST = re.compile(r" [0-9a-f]{12}$")  # hash of a network's weights, after its name
_PROGRESS_LINES = 10  # of an evaluation


class ScoreConfig(Settings):
    """Generation of images, and the networks that score them."""

    weights: Path = Path("runs/sd2")
    """folder of a run, or safetensors file of hpcai"""
    checkpoints: bool = False
    """evaluate all checkpoints that the run has kept, in order, instead of its final weights"""
    captions: Path | None = None
    """file with a caption on each line; of .tsv and .csv the column "caption" """
    count: PositiveInt | None = None
    """number of captions, from the first; null: all"""
    model: Path | None = None
    """pipeline of diffusers with folders vae, text_encoder, tokenizer ...; or name its parts:"""
    vae: Path | None = None
    """autoencoder of the latents"""
    tokens: Path | None = None
    """text encoder whose last hidden states the model was trained with"""
    pooled: Path | None = None
    """text encoder whose pooled output it was trained with"""
    long: Literal["refuse", "cut"] = "refuse"
    """refuse or truncate captions that are too long for the encoder; the CLIP of the score always truncates"""
    features: str | None = None
    """package.module:name of a function that returns a torch module: images [B, 3, H, W] in [0, 1] -> features [B, F]"""
    statistics: Path | None = None
    """.npz with mean `mu` and covariance `sigma` of the features of true images"""
    clip: Path | None = None
    """folder of a CLIP in transformers' format"""
    batch: PositiveInt = 8
    """images in a batch of a model replica"""
    seed: int = 0
    """of the initial noise"""
    sampler: SamplerConfig | None = None
    """sampler of images; null: that of the model's settings"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """of weights and computation up to the images; auto: bf16 on a GPU with fast bf16"""
    mesh: AxesConfig = AxesConfig()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.captions is None:
            raise ValueError("captions is null; name a file with a caption on each line")
        if self.model is None and self.vae is None:
            raise ValueError("neither model nor vae is given, so latents cannot be decoded; name a pipeline or an autoencoder")
        if self.model is not None and (self.vae or self.tokens or self.pooled):
            raise ValueError("model is given beside vae, tokens or pooled; name a full pipeline, or its parts")
        if (self.features is None) != (self.statistics is None):
            raise ValueError("features and statistics go together: name both, for FID, or neither")
        if self.features is None and self.clip is None:
            raise ValueError("no score is set: give features and statistics, for FID, or clip")
        if self.features is not None and not all(self.features.partition(":")):
            raise ValueError(f"features is {self.features!r}; expected package.module:name")
        return self


def run(args: Sequence[str]) -> None:
    """Run the command with its command-line arguments."""
    sys.argv[1:] = list(args)
    config.run(ScoreConfig, main)


def main(cfg: ScoreConfig) -> None:
    from hpcai import dist

    with dist.start(cfg.mesh) as mesh:
        log.setup(mesh.job.rank, mesh.job.size)
        scorer = Scorer(cfg, mesh)
        for weights in iterate_weights(cfg, mesh):
            metrics = scorer.score(weights.path)
            if mesh.is_first:
                at = "" if weights.step is None else f"step {weights.step:<8}"
                for name, value in metrics.items():
                    print(f"{at}{name:20}{value:,}" if isinstance(value, int) else f"{at}{name:20}{value:.6g}", flush=True)
                log_mlperf_result(cfg.weights, weights, metrics)


class Weights(NamedTuple):
    path: Path
    step: int | None = None
    saved: float | None = None
    """time of the completed checkpoint, in seconds since 1970"""


def iterate_weights(cfg: ScoreConfig, mesh: Any) -> Iterator[Weights]:
    """Yield the weights to evaluate. Rank 0 exports those of a checkpoint into a temporary file in the folder of the run. Raises
    DataError for a run without checkpoints, or if one is missing in its events."""
    from hpcai.dist.collectives import broadcast_from_first
    from hpcai.train.checkpoint_reader import export, list_checkpoints, step_number

    if not cfg.checkpoints:
        yield Weights(cfg.weights)
        return
    times = {event["step"]: event["time"] for event in log.read_metrics(cfg.weights / log.METRICS) if event["kind"] == "checkpoint"}
    checkpoints = broadcast_from_first(lambda: list_checkpoints(cfg.weights / "checkpoints"), mesh.peers)
    if not checkpoints or (unknown := [path for path in checkpoints if step_number(path) not in times]):
        what = f"{unknown[0]}: not in {log.METRICS}" if checkpoints else f"{cfg.weights}: has no checkpoint"
        raise DataError(f"{what}; give weights=RUN of a run that has kept some, or leave checkpoints out")
    path = cfg.weights / ".judged.safetensors"
    try:
        for checkpoint in checkpoints:
            broadcast_from_first(partial(export, checkpoint, path), mesh.peers)
            yield Weights(path, step_number(checkpoint), times[step_number(checkpoint)])
    finally:
        if mesh.is_first:
            path.unlink(missing_ok=True)


def log_mlperf_result(folder: Path, weights: Weights, metrics: dict[str, float]) -> None:
    """Append the metrics of a checkpoint to the MLPerf log of the run in ``folder``, if its benchmark has goals for them. Logs a
    warning if they cannot be appended, such as while the run goes on."""
    path = folder / "mlperf.log"
    if weights.step is None or weights.saved is None or not path.is_file():
        return
    benchmark = BENCHMARKS.get(config.load(Config, folder / "settings.yaml", []).benchmark or "")
    if benchmark is None or not benchmark.goals:
        return
    if missing := [goal.label for goal in benchmark.goals if goal.metric not in metrics]:
        logger.warning("%s: step %d is not appended, since %s is missing", path, weights.step, missing[0])
        return
    try:
        reached = judge_checkpoint(path, benchmark, weights.step, weights.saved, metrics, int(metrics["captions"]))
    except DataError as problem:  # such as that the run goes on
        logger.warning("step %d: %s", weights.step, problem)
        return
    goals = " and ".join(f"{goal.label} {goal.target:g}" for goal in benchmark.goals)
    logger.info("%s: step %s %s %s", path, weights.step, "reaches" if reached else "does not reach", goals)


def read_captions(path: Path, count: int | None = None) -> list[str]:
    """Read captions. Raises DataError with the number of the first empty line or row."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as text ({problem})") from problem
    if path.suffix in (".tsv", ".csv"):
        rows = csv.DictReader(text.splitlines(), delimiter="\t" if path.suffix == ".tsv" else ",")
        if _COLUMN not in (rows.fieldnames or ()):
            raise DataError(f"{path}: its columns are {', '.join(rows.fieldnames or ('none',))}; expected one named {_COLUMN}")
        captions = [(row[_COLUMN] or "").strip() for row in rows]
    else:
        captions = [line.strip() for line in text.splitlines()]
    captions = captions[:count]
    if not captions or not all(captions):
        where = f"row {captions.index('') + 1} has" if captions else "there is"
        raise DataError(f"{path}: {where} no caption; expected one in each")
    return captions


class Scorer:
    """Generates images and scores them, with networks that are the same for all weights."""

    def __init__(self, cfg: ScoreConfig, mesh: Any) -> None:
        from apps.diffusion.feature_networks import Clip, Features, read_statistics
        from data_prep import encoders
        from hpcai.dist.collectives import broadcast_from_first
        from hpcai.train.auto_settings import has_fast_bf16

        assert cfg.captions is not None
        mesh.check_axes("score", "replicate", "tensor")
        self.cfg, self.mesh = cfg, mesh
        self.captions = broadcast_from_first(partial(read_captions, cfg.captions, cfg.count), mesh.peers)
        on_gpu = mesh.device.type == "cuda"
        self.use_bf16 = cfg.precision == "bf16" or (cfg.precision == "auto" and on_gpu and has_fast_bf16(mesh.device))
        self.true_statistics = None if cfg.statistics is None else read_statistics(cfg.statistics)
        self.features = None if cfg.features is None else Features(cfg.features, mesh.device)
        self.clip = None if cfg.clip is None else Clip(cfg.clip, mesh.device)
        precision = "bfloat16" if self.use_bf16 else "float32"
        chosen = encoders.resolve_networks(cfg.model, cfg.vae, cfg.tokens, cfg.pooled, None, cfg.long == "cut", precision,
                                          str(mesh.device))  # fmt: skip
        self.opened = encoders.load_networks(chosen)

    def score(self, path: Path) -> dict[str, float]:
        """Return all scores of the model at ``path``, equal on all ranks."""
        import torch

        from hpcai.train.metrics import MetricSums

        model, replicas, sums = self.load_model(path), self.mesh["replicate"], MetricSums()
        indices = range(replicas.rank, len(self.captions), replicas.size)
        interval = max(1, len(indices) // _PROGRESS_LINES)
        for at in range(0, len(indices), self.cfg.batch):
            numbers = indices[at : at + self.cfg.batch]
            with torch.no_grad():
                images = self.generate_images(model, numbers)
                sums.add(self.score_sums(images, [self.captions[number] for number in numbers]), len(numbers))
            done = at + len(numbers)
            if done // interval > at // interval:
                logger.info("%s: %d of %d captions", path, min(done * replicas.size, len(self.captions)), len(self.captions))
        return sums.reduce(replicas, self.mesh.device, uneven=True) | {"captions": len(self.captions)}

    def load_model(self, path: Path) -> Any:
        """Load a model on the mesh. Raises ConfigError if its samples are no latents, or if it was trained with other encoders."""
        import torch

        from hpcai.models.diffusion import Diffusion, DiffusionConfig, load_deferred, parallelize
        from hpcai.nn.deferred_init import deferred, materialize
        from hpcai.nn.weights import read_settings

        file = path / "model.safetensors" if path.is_dir() else path
        settings = read_settings(file, "diffusion", DiffusionConfig)
        if settings is None or settings.latents is None:
            raise ConfigError(f"{file}: its samples are no latents, which decode to images; give weights of a model of latents")
        self._check_encoders(file, settings)
        with deferred():
            model = load_deferred(Diffusion(settings), path, partial(parallelize, mesh=self.mesh))
        return materialize(model, self.mesh.device, dtype=torch.bfloat16 if self.use_bf16 else torch.float32).eval()

    def _check_encoders(self, file: Path, settings: Any) -> None:
        latents, vae, texts = settings.latents, self.opened.vae, self.opened.text_encoders
        if vae is None or vae.cfg.latents != settings.size[0]:
            actual = "no autoencoder" if vae is None else f"latents of {vae.cfg.latents} channels"
            raise ConfigError(f"{self.opened.cfg.vae}: {actual}; {file} expects latents of {settings.size[0]}, by {latents.vae}")
        for name in ("tokens", "pooled"):
            expected = getattr(latents, name)
            if expected is None:
                continue
            expected = expected if isinstance(expected, tuple) else (expected,)
            size = tuple(texts[name].shape) if name in texts else None
            if size != expected:
                actual = f"no encoder of {name}" if size is None else f"{texts[name].folder}: {name} {list(size)}"
                trained = f"{list(expected)} of {', '.join(latents.encoders)}"
                raise ConfigError(f"{actual}; {file} was trained with {trained}: name that one")
        # Downloaded latents and text embeddings lack the hashes of the networks that encoded them.
        recorded = [name for name in (latents.vae, *latents.encoders) if _DIGEST.search(name)]
        if not recorded:
            return
        vae, encoders = self.opened.cfg.identities()
        identities = [name for name in (vae, *encoders) if name is not None]
        if missing := [name for name in recorded if name[-12:] not in {other[-12:] for other in identities}]:
            raise ConfigError(f"{file} was trained with {missing[0]}, given are {', '.join(identities)}; name its folder")

    def generate_images(self, model: Any, numbers: Sequence[int]) -> Any:
        """Generate images in [0, 1], rounded to 8 bits.   [B, 3, H, W]"""
        import torch

        from hpcai.models.diffusion import Condition

        captions = [self.captions[number] for number in numbers]
        named = [f"{self.cfg.captions}: caption {number + 1}" for number in numbers]
        texts = {name: encoder.encode(captions, named)[0] for name, encoder in self.opened.text_encoders.items()
                if getattr(model.cfg.latents, name)}  # fmt: skip
        if self.opened.vae is not None and getattr(model.cfg.network, "sizes", None):  # of images as large as they are drawn
            sides = [side * 2 ** (len(self.opened.vae.cfg.channels) - 1) for side in model.cfg.size[1:]]
            texts["sizes"] = torch.tensor([*sides, 0, 0, *sides]).expand(len(numbers), 6)
        with torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=self.use_bf16):
            drawn = model.sample(Condition(**texts), seed=self.cfg.seed, sampler=self.cfg.sampler, indices=torch.tensor(numbers))[0]
        latents = drawn.float() / model.cfg.latents.scale + model.cfg.latents.shift
        images = self.opened.decode(latents).to(self.mesh.device) / 2 + 0.5
        if not images.isfinite().all():
            raise DataError("images have pixels that are not finite; check the weights, or set precision to fp32")
        return (images * 255).round() / 255

    def score_sums(self, images: Any, captions: Sequence[str]) -> dict[str, Any]:
        from hpcai.models.diffusion import scores

        sums: dict[str, Any] = {}
        if self.features is not None and self.true_statistics is not None:
            sums["fid"] = scores.fid_to_sums(self.features(images), *self.true_statistics)
        if self.clip is not None:
            sums["clip"] = scores.clip_sums(self.clip.embed_images(images), self.clip.embed_texts(captions))
        return sums
