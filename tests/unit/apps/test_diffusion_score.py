"""``python -m apps.diffusion score``: FID and CLIP scores by networks of the user, of the weights and checkpoints of a run."""

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from apps.diffusion import score
from apps.diffusion.score import ScoreConfig, Scorer, read_captions
from data_prep import encoders
from hpcai import config, errors
from hpcai.dist.mesh import Mesh
from hpcai.log import read_metrics
from hpcai.models.diffusion import (
    VAE,
    Condition,
    Diffusion,
    DiffusionConfig,
    LatentsConfig,
    SamplerConfig,
    UNetConfig,
    VAEConfig,
    load_network,
    save_folder,
)
from hpcai.models.diffusion.lora import load_adapter, merge
from hpcai.models.diffusion.scores import frechet
from tests.captions import WORDS, save_tokenizer
from tests.ranks.launch import on_ranks
from tests.reference_data import load_json

_REASON = "transformers is not installed: FID and CLIP of images are NOT tested; pip install hpcai-suite[latents]"
transformers: Any = pytest.importorskip("transformers", reason=_REASON)
pytestmark = pytest.mark.usefixtures("quiet_hugging_face")

TOKENS, CHANNELS, CLIP_SIZE, FEATURES = 9, 8, 8, 5  # tokens of a caption and their channels, side of a CLIP image
CAPTIONS = ["a red cat", "the moon on a dog", "green green dog", "blue", "a cat on the moon"]
MODULE = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        assert x.shape[1:] == (3, 16, 16) and 0 <= x.min() and x.max() <= 1 and (255 * x - (255 * x).round()).abs().max() < 1e-3
        rows = x.flatten(1)
        return torch.stack([rows.mean(1), rows.std(1), x[:, 0].mean((1, 2)), x[:, :, 3, 4].mean(1), (9 * rows).sin().mean(1)], 1)

def flat():
    return torch.nn.Identity()
"""


def small_config(**kwargs: Any) -> Any:
    return dict(hidden_size=CHANNELS, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, **kwargs)


def text_config(**kwargs: Any) -> Any:
    return small_config(vocab_size=20, max_position_embeddings=TOKENS, eos_token_id=2, bos_token_id=1, pad_token_id=0, **kwargs)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, the pipeline of its data, a CLIP, statistics, captions and a module of feature networks."""
    home = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    cfg = VAEConfig(latents=2, channels=(8, 8), blocks=1, groups=2, scale=0.5, shift=0.1)
    vae = VAE(cfg)
    for parameter in vae.parameters():
        nn.init.normal_(parameter, std=0.3)
    save_folder(vae.state_dict(), cfg, home / "pipeline/vae")
    transformers.CLIPTextModel(transformers.CLIPTextConfig(**text_config())).save_pretrained(home / "pipeline/text_encoder")
    save_tokenizer(home / "pipeline/tokenizer", True)
    identities = {"vae": encoders.identity(home / "pipeline/vae"), "encoders": (encoders.identity(home / "pipeline/text_encoder"),)}
    sizes: Any = {"inputs": 2, "outputs": 2, "channels": (4, 8), "heads": (1, 2), "tokens": CHANNELS, "groups": 2}
    unet = UNetConfig(**sizes, attention=("cross", "none"), zero=False)
    latents = LatentsConfig(scale=0.5, shift=0.1, tokens=(TOKENS, CHANNELS), **identities)
    sampler = SamplerConfig(steps=3, guidance=2.0)
    model = Diffusion(DiffusionConfig(unet=unet, size=(2, 8, 8), latents=latents, sampler=sampler), seed=3)
    model.no_tokens.copy_(torch.randn(TOKENS, CHANNELS))
    (home / "run").mkdir()
    model.save(home / "run/model.safetensors")
    clip_config = transformers.CLIPConfig(
        text_config=text_config(), vision_config=small_config(image_size=CLIP_SIZE, patch_size=4), projection_dim=6
    )
    clip_model = transformers.CLIPModel(clip_config)
    for layer_norm in (clip_model.vision_model.post_layernorm, clip_model.text_model.final_layer_norm):
        layer_norm.bias.data += 0.5  # so that image and text embeddings are correlated
    clip_model.visual_projection.weight.data.copy_(clip_model.text_projection.weight)
    clip_model.save_pretrained(home / "clip")
    save_tokenizer(home / "clip", True)
    preprocessor = {"size": {"shortest_edge": CLIP_SIZE}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    (home / "clip/preprocessor_config.json").write_text(json.dumps(preprocessor))
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, FEATURES))
    np.savez(home / "true.npz", mu=features.mean(0), sigma=np.cov(features, rowvar=False))
    (home / "some_features.py").write_text(MODULE)
    (home / "captions.txt").write_text("\n".join(CAPTIONS) + "\n")
    return home


@pytest.fixture(autouse=True)
def run_in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))


def new_config(**overrides: Any) -> ScoreConfig:
    settings: dict[str, Any] = {
        "weights": "run", "captions": "captions.txt", "model": "pipeline", "features": "some_features:Net",
        "statistics": "true.npz", "clip": "clip", "batch": 2, "precision": "fp32",
    }  # fmt: skip
    return config.load(ScoreConfig, None, [f"{name}={'null' if x is None else x}" for name, x in (settings | overrides).items()])


def compute_scores(mesh: Mesh, cfg: ScoreConfig) -> dict[str, float]:
    return Scorer(cfg, mesh).score(cfg.weights)


@torch.no_grad()
def reference_scores(home: Path, seed: int) -> dict[str, float]:
    """Compute the scores of all images in one batch, by the networks themselves."""
    vae, model = load_network(home / "pipeline/vae"), Diffusion.load(home / "run")
    encoder = transformers.CLIPTextModel.from_pretrained(home / "pipeline/text_encoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "pipeline/tokenizer")
    ids = tokenizer(CAPTIONS, padding="max_length", max_length=TOKENS, return_tensors="pt").input_ids
    latents = model.sample(Condition(tokens=encoder(input_ids=ids).last_hidden_state), seed=seed)[0]
    images = (vae.decode(latents / 0.5 + 0.1).clamp(-1, 1) / 2 + 0.5).mul(255).round() / 255
    features, true = sys.modules["some_features"].Net()(images).double(), np.load(home / "true.npz")
    fid = frechet(features.mean(0), features.T.cov(), *map(torch.from_numpy, (true["mu"], true["sigma"])))
    clip = transformers.CLIPModel.from_pretrained(home / "clip")
    resized = nn.functional.interpolate(images, (CLIP_SIZE, CLIP_SIZE), mode="bicubic", antialias=True).clamp(0, 1)
    pixels = (resized - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    texts = transformers.AutoTokenizer.from_pretrained(home / "clip")(CAPTIONS, padding=True, return_tensors="pt")
    outputs = clip(input_ids=texts.input_ids, attention_mask=texts.attention_mask, pixel_values=pixels)
    return {"fid": float(fid), "clip_cosine": float((outputs.image_embeds * outputs.text_embeds).sum(1).mean())}


def test_scores_equal_those_of_the_networks_in_one_batch(home: Path) -> None:
    actual, expected = compute_scores(Mesh({}), new_config(seed=4)), reference_scores(home, 4)
    assert actual["fid"] == pytest.approx(expected["fid"], rel=1e-4) and actual["captions"] == 5
    assert actual["clip_cosine"] == pytest.approx(expected["clip_cosine"], rel=1e-4)
    assert abs(expected["clip_cosine"]) > 1e-3 and expected["fid"] > 0.1


def test_four_ranks_compute_the_same_scores() -> None:
    cfg = new_config(count=3)  # one rank has no caption
    expected = compute_scores(Mesh({}), cfg)
    for scores in on_ranks({"replicate": 4}, compute_scores, cfg, fresh=True):
        assert scores == pytest.approx(expected, rel=1e-3)


def test_one_score_is_enough_and_networks_can_be_given_separately() -> None:
    assert set(compute_scores(Mesh({}), new_config(features=None, statistics=None))) >= {"clip_cosine", "captions"}
    networks = {"model": None, "vae": "pipeline/vae", "tokens": "pipeline/text_encoder"}
    assert set(compute_scores(Mesh({}), new_config(clip=None, **networks))) == {"fid", "captions"}


# ---- a run and its checkpoints


@pytest.fixture(scope="module")
def trained_run(home: Path) -> Path:
    """A run of four steps with two checkpoints, on latents of images by the pipeline, with the MLPerf log of Stable Diffusion."""
    from data_prep import latents

    (home / "images").mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        np.save(home / f"images/{number:02}.npy", pixels)
        (home / f"images/{number:02}.txt").write_text(CAPTIONS[number % 5])
    args = ["convert", home / "images", home / "latents", "--model", home / "pipeline", "--size", 16, "--validation", 4]
    assert latents.main([*map(str, args), "--workers", "1", "--device", "cpu"]) == 0
    return train(home, f"report.directory={home}/trained", "report.sinks=[mlperf]", "benchmark=stable_diffusion")


def train(home: Path, *overrides: str) -> Path:
    from apps.diffusion.__main__ import main
    from apps.diffusion.settings import Config

    unet = "{inputs: 2, outputs: 2, channels: [4, 8], attention: [cross, none], heads: [1, 2], groups: 2, zero: false, tokens: 8}"
    settings = [
        f"model.unet={unet}", "model.sampler={method: ddim, steps: 2, guidance: 2.0}", f"data.directory={home}/latents",
        "data.batch=4", "data.evaluation_batch=4", "data.drawn=0", "data.workers=1", "train.epochs=2",
        "train.steps=null", "train.collect_every=null", "step.schedule={unit: steps, warmup: 1}",
        "step.betas=[0.9, 0.999]", "step.weight_decay=0.01",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as exited:
        config.run(Config, main, [*settings, *overrides])
    assert not exited.value.code
    return home / "trained"


def test_a_run_trains_adapters_of_given_weights(trained_run: Path, home: Path, tmp_path: Path) -> None:
    train(home, f"start.weights={trained_run}", "lora={rank: 2}", "report.sinks=[]", f"report.directory={tmp_path}")
    base, model = (Diffusion.load(trained_run) for _ in range(2))
    assert load_adapter(model, tmp_path / "adapter").rank == 2 and not (tmp_path / "model.safetensors").exists()
    changed = {name for name, x in merge(model).state_dict().items() if not torch.equal(x, base.state_dict()[name])}
    assert len(changed) == 48 and all(".attn" in name for name in changed)


def passes_checker(path: Path) -> bool:
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    checker = compliance.make_checker("training", "5.0.0", True, False)
    return bool(compliance.main(str(path), "training_5.0.0/common.yaml", checker)[0])


def test_checkpoints_are_scored_and_the_mlperf_log_is_updated(trained_run: Path, tmp_path: Path, command: Any) -> None:
    """The log of a run lacks the quality; with the scores it passes the checker, and ends at the first checkpoint."""
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    assert not passes_checker(run / "mlperf.log")
    rows = [line.split() for line in command(*CALL, f"weights={run}", "checkpoints=true").splitlines()]
    assert not list(run.glob(".judged*"))
    last, first = ({fields[2]: float(fields[3]) for fields in rows if fields[1] == step} for step in ("4", "2"))
    assert len(rows) == 2 * len(first) and first != last and first["captions"] == 5 and 0 < first["fid"] < 90
    final = dict(line.split() for line in command(*CALL, f"weights={run}").splitlines())
    assert {name: float(value) for name, value in final.items()} == pytest.approx(last, rel=1e-4)

    lines = [json.loads(line[9:]) for line in (run / "mlperf.log").read_text().splitlines()]
    accuracies = [(line["metadata"]["samples_count"], line["metadata"]["metric"], line["value"]) for line in lines
             if line["key"] == "eval_accuracy"]  # fmt: skip
    assert [accuracy[:2] for accuracy in accuracies] == [(8, "FID"), (8, "CLIP"), (16, "FID"), (16, "CLIP")]
    expected = [score[name] for score in (first, last) for name in ("fid", "clip_cosine")]
    assert [accuracy[2] for accuracy in accuracies] == pytest.approx(expected, rel=1e-5)
    assert lines[-1]["metadata"] == {"status": "success", "epoch_num": 1, "step_num": 2, "samples_count": 8}
    saved = [event for event in read_metrics(run / "metrics.jsonl") if event["kind"] == "checkpoint"]
    assert lines[-1]["time_ms"] == round(1000 * saved[0]["time"])
    assert passes_checker(run / "mlperf.log")


# ---- invalid input


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command with some arguments and return its standard output."""

    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["python"])
        score.run(args)
        return str(capsys.readouterr().out)

    return run


CALL = (
    "captions=captions.txt", "model=pipeline", "features=some_features:Net", "statistics=true.npz", "clip=clip", "precision=fp32",
)  # fmt: skip


@pytest.fixture(scope="module")
def invalid_files(home: Path) -> Path:
    """Write files with one fault each."""
    (home / "long.txt").write_text("a cat\n" + " ".join(WORDS) + "\n")
    shutil.copytree(home / "clip", home / "pickled")
    (home / "pickled/model.safetensors").unlink()
    torch.save(load_file(home / "clip/model.safetensors"), home / "pickled/pytorch_model.bin")
    cfg = Diffusion.load(home / "run").cfg
    assert cfg.latents is not None
    latents = cfg.latents.model_copy(update={"vae": "vae 0123456789ab"})
    Diffusion(cfg.model_copy(update={"latents": latents})).save(home / "other.safetensors")
    return home


@pytest.mark.usefixtures("invalid_files")
@pytest.mark.parametrize("overrides, error, message", load_json("refused/diffusion_scores"))
def test_invalid_input_raises(overrides: dict[str, Any], error: str, message: str) -> None:
    with pytest.raises(getattr(errors, error), match=message):
        compute_scores(Mesh({}), new_config(**overrides))


def test_captions_of_tables_equal_those_of_lines(tmp_path: Path) -> None:
    """MLPerf has the captions of COCO in a table."""
    texts = ['a "red" cat', "one, two", "the moon"]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    for name, delimiter in (("a.tsv", "\t"), ("a.csv", ",")):
        with (tmp_path / name).open("w", newline="") as file:
            rows = [["image_id", "id", "caption"], *([n, n + 5, text] for n, text in enumerate(texts))]
            csv.writer(file, delimiter=delimiter).writerows(rows)
        assert read_captions(tmp_path / name) == read_captions(tmp_path / "a.txt") == texts
    assert read_captions(tmp_path / "a.tsv", 2) == texts[:2]
