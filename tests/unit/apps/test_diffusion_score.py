"""``python -m apps.diffusion score``: FID and CLIP by networks that a user brings, of a run's weights and of its checkpoints."""

import csv
import json
import shutil
import sys
from collections.abc import Iterator
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
from hpcai import config
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DataError
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
from hpcai.models.diffusion.scores import frechet
from tests.captions import WORDS, save_tokenizer
from tests.ranks.launch import on_ranks

_WHY = "transformers is not installed: FID and CLIP of images are NOT tested; pip install hpcai-suite[latents]"
transformers: Any = pytest.importorskip("transformers", reason=_WHY)
pytestmark = pytest.mark.usefixtures("one_thread")

PLACES, J, SIDE, FEATURES = 9, 8, 8, 5  # tokens of a caption and their channels, the side of an image for the CLIP
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


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(level)


def small(**more: Any) -> Any:
    return dict(hidden_size=J, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, **more)


def words(**more: Any) -> Any:
    return small(vocab_size=20, max_position_embeddings=PLACES, eos_token_id=2, bos_token_id=1, pad_token_id=0, **more)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, a pipeline of the networks that made its data, a CLIP, statistics, and a module with features."""
    home = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    cfg = VAEConfig(latents=2, channels=(8, 8), blocks=1, groups=2, scale=0.5, shift=0.1)
    vae = VAE(cfg)
    for parameter in vae.parameters():
        nn.init.normal_(parameter, std=0.3)
    save_folder(vae.state_dict(), cfg, home / "pipeline/vae")
    transformers.CLIPTextModel(transformers.CLIPTextConfig(**words())).save_pretrained(home / "pipeline/text_encoder")
    save_tokenizer(home / "pipeline/tokenizer", True)
    kept = {"vae": encoders.identity(home / "pipeline/vae"), "encoders": (encoders.identity(home / "pipeline/text_encoder"),)}
    sizes: Any = {"inputs": 2, "outputs": 2, "channels": (4, 8), "heads": (1, 2), "tokens": J, "groups": 2}
    unet = UNetConfig(**sizes, attention=("cross", "none"), zero=False)
    latents = LatentsConfig(scale=0.5, shift=0.1, tokens=(PLACES, J), **kept)
    drawing = SamplerConfig(steps=3, guidance=2.0)
    model = Diffusion(DiffusionConfig(unet=unet, size=(2, 8, 8), latents=latents, sampler=drawing), seed=3)
    model.no_tokens.copy_(torch.randn(PLACES, J))
    (home / "run").mkdir()
    model.save(home / "run/model.safetensors")
    clip = transformers.CLIPConfig(
        text_config=words(), vision_config=small(image_size=SIDE, patch_size=4), projection_dim=6
    )
    judge = transformers.CLIPModel(clip)
    for half in (judge.vision_model.post_layernorm, judge.text_model.final_layer_norm):
        half.bias.data += 0.5  # so that images and texts agree somewhat
    judge.visual_projection.weight.data.copy_(judge.text_projection.weight)
    judge.save_pretrained(home / "clip")
    save_tokenizer(home / "clip", True)
    seen = {"size": {"shortest_edge": SIDE}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    (home / "clip/preprocessor_config.json").write_text(json.dumps(seen))
    rng = np.random.default_rng(0)
    many = rng.normal(size=(40, FEATURES))
    np.savez(home / "true.npz", mu=many.mean(0), sigma=np.cov(many, rowvar=False))
    (home / "some_features.py").write_text(MODULE)
    (home / "captions.txt").write_text("\n".join(CAPTIONS) + "\n")
    return home


@pytest.fixture(autouse=True)
def there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user stands."""
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))


def asked(**more: Any) -> ScoreConfig:
    given: dict[str, Any] = {
        "weights": "run", "captions": "captions.txt", "model": "pipeline", "features": "some_features:Net",
        "statistics": "true.npz", "clip": "clip", "batch": 2, "precision": "fp32",
    }  # fmt: skip
    return config.load(ScoreConfig, None, [f"{name}={'null' if x is None else x}" for name, x in (given | more).items()])


def scored(mesh: Mesh, cfg: ScoreConfig) -> dict[str, float]:
    return Scorer(cfg, mesh).score(cfg.weights)


@torch.no_grad()
def by_hand(home: Path, seed: int) -> dict[str, float]:
    """All images at once, by the networks themselves."""
    vae, model = load_network(home / "pipeline/vae"), Diffusion.load(home / "run")
    encoder = transformers.CLIPTextModel.from_pretrained(home / "pipeline/text_encoder")
    words = transformers.AutoTokenizer.from_pretrained(home / "pipeline/tokenizer")
    ids = words(CAPTIONS, padding="max_length", max_length=PLACES, return_tensors="pt").input_ids
    drawn = model.sample(Condition(tokens=encoder(input_ids=ids).last_hidden_state), seed=seed)[0]
    images = (vae.decode(drawn / 0.5 + 0.1).clamp(-1, 1) / 2 + 0.5).mul(255).round() / 255
    features, true = sys.modules["some_features"].Net()(images).double(), np.load(home / "true.npz")
    fid = frechet(features.mean(0), features.T.cov(), *map(torch.from_numpy, (true["mu"], true["sigma"])))
    clip = transformers.CLIPModel.from_pretrained(home / "clip")
    smaller = nn.functional.interpolate(images, (SIDE, SIDE), mode="bicubic", antialias=True).clamp(0, 1)
    pixels = (smaller - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    told = transformers.AutoTokenizer.from_pretrained(home / "clip")(CAPTIONS, padding=True, return_tensors="pt")
    both = clip(input_ids=told.input_ids, attention_mask=told.attention_mask, pixel_values=pixels)
    return {"fid": float(fid), "clip_cosine": float((both.image_embeds * both.text_embeds).sum(1).mean())}


def test_scores_are_what_the_networks_say_themselves(home: Path) -> None:
    found, expected = scored(Mesh({}), asked(seed=4)), by_hand(home, 4)
    assert found["fid"] == pytest.approx(expected["fid"], rel=1e-4) and found["captions"] == 5
    assert found["clip_cosine"] == pytest.approx(expected["clip_cosine"], rel=1e-4)
    assert abs(expected["clip_cosine"]) > 1e-3 and expected["fid"] > 0.1


def test_four_ranks_find_the_same() -> None:
    cfg = asked(count=3)  # of which one has none
    alone = scored(Mesh({}), cfg)
    for each in on_ranks({"replicate": 4}, scored, cfg, fresh=True):
        assert each == pytest.approx(alone, rel=1e-3)


def test_one_kind_of_judge_is_enough_and_networks_may_be_named_one_by_one() -> None:
    assert set(scored(Mesh({}), asked(features=None, statistics=None))) >= {"clip_cosine", "captions"}
    parts = {"model": None, "vae": "pipeline/vae", "tokens": "pipeline/text_encoder"}
    assert set(scored(Mesh({}), asked(clip=None, **parts))) == {"fid", "captions"}


# ---- a run and its checkpoints


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """A run on latents of images that the pipeline makes, with a log of MLPerf's Stable Diffusion: four steps, two checkpoints."""
    from apps.diffusion.__main__ import main
    from apps.diffusion.settings import Config
    from data_prep import latents

    (home / "images").mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        np.save(home / f"images/{number:02}.npy", pixels)
        (home / f"images/{number:02}.txt").write_text(CAPTIONS[number % 5])
    line = ["convert", home / "images", home / "latents", "--model", home / "pipeline", "--size", 16, "--validation", 4]
    assert latents.main([*map(str, line), "--workers", "1", "--device", "cpu"]) == 0
    unet = "{inputs: 2, outputs: 2, channels: [4, 8], attention: [cross, none], heads: [1, 2], groups: 2, zero: false, tokens: 8}"
    given = [
        f"model.unet={unet}", "model.sampler={method: ddim, steps: 2, guidance: 2.0}", f"data.directory={home}/latents",
        "data.batch=4", "data.evaluation_batch=4", "data.drawn=0", "data.workers=1", "train.epochs=2",
        "train.steps=null", "train.collect_every=null", "step.schedule={unit: steps, warmup: 1}",
        "step.betas=[0.9, 0.999]", "step.weight_decay=0.01",
        f"report.directory={home}/trained", "report.sinks=[mlperf]", "benchmark=stable_diffusion",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        config.run(Config, main, given)
    assert not end.value.code
    return home / "trained"


def complies(path: Path) -> bool:
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    checker = compliance.make_checker("training", "5.0.0", True, False)
    return bool(compliance.main(str(path), "training_5.0.0/common.yaml", checker)[0])


def test_checkpoints_are_judged_and_the_log_is_told(trained: Path, tmp_path: Path, command: Any) -> None:
    """The log of a run, which alone misses its quality, then passes the checker: it ends with the first checkpoint."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    assert not complies(run / "mlperf.log")
    told = [line.split() for line in command(*CALL, f"weights={run}", "checkpoints=true").splitlines()]
    assert not list(run.glob(".judged*"))
    last, first = ({words[2]: float(words[3]) for words in told if words[1] == step} for step in ("4", "2"))
    assert len(told) == 2 * len(first) and first != last and first["captions"] == 5 and 0 < first["fid"] < 90
    plain = dict(line.split() for line in command(*CALL, f"weights={run}").splitlines())
    assert {name: float(value) for name, value in plain.items()} == pytest.approx(last, rel=1e-4)

    lines = [json.loads(line[9:]) for line in (run / "mlperf.log").read_text().splitlines()]
    marks = [(line["metadata"]["samples_count"], line["metadata"]["metric"], line["value"]) for line in lines
             if line["key"] == "eval_accuracy"]  # fmt: skip
    assert [mark[:2] for mark in marks] == [(8, "FID"), (8, "CLIP"), (16, "FID"), (16, "CLIP")]
    found = [score[name] for score in (first, last) for name in ("fid", "clip_cosine")]
    assert [mark[2] for mark in marks] == pytest.approx(found, rel=1e-5)
    assert lines[-1]["metadata"] == {"status": "success", "epoch_num": 1, "step_num": 2, "samples_count": 8}
    saved = [event for event in read_metrics(run / "metrics.jsonl") if event["kind"] == "checkpoint"]
    assert lines[-1]["time_ms"] == round(1000 * saved[0]["time"])
    assert complies(run / "mlperf.log")


# ---- bad input


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command says on its output."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["python"])
        score.run(words)
        return str(capsys.readouterr().out)

    return run


CALL = (
    "captions=captions.txt", "model=pipeline", "features=some_features:Net", "statistics=true.npz", "clip=clip", "precision=fp32",
)  # fmt: skip
WRONG = [
    ({"captions": None}, ConfigError, "captions is null"),
    ({"features": "some_features:flat"}, DataError, r"returned \[2, 3, 16, 16\] for 2 images; expected \[2, F\]"),
    ({"statistics": "captions.txt"}, DataError, "captions.txt: .*; expected an .npz"),
    ({"clip": "pickled"}, DataError, "pickled: cannot be read as a CLIP"),
    ({"weights": "other.safetensors"}, ConfigError, r"with vae 0123456789ab, given are vae \w{12}, text_encoder \w{12}"),
    ({"captions": "long.txt"}, DataError, "long.txt: caption 2: a caption of 11 tokens, .*text_encoder takes 9"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bad(home: Path) -> Path:
    """Files of which each has something wrong."""
    (home / "long.txt").write_text("a cat\n" + " ".join(WORDS) + "\n")
    shutil.copytree(home / "clip", home / "pickled")
    (home / "pickled/model.safetensors").unlink()
    torch.save(load_file(home / "clip/model.safetensors"), home / "pickled/pytorch_model.bin")
    cfg = Diffusion.load(home / "run").cfg
    assert cfg.latents is not None
    other = cfg.latents.model_copy(update={"vae": "vae 0123456789ab"})
    Diffusion(cfg.model_copy(update={"latents": other})).save(home / "other.safetensors")
    return home


@pytest.mark.usefixtures("bad")
@pytest.mark.parametrize("given, error, text", WRONG)
def test_bad_input_is_told(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        scored(Mesh({}), asked(**given))


def test_captions_of_tables_are_those_of_lines(tmp_path: Path) -> None:
    """MLPerf's are a table of COCO's."""
    texts = ['a "red" cat', "one, two", "the moon"]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    for name, parted in (("a.tsv", "\t"), ("a.csv", ",")):
        with (tmp_path / name).open("w", newline="") as file:
            rows = [["image_id", "id", "caption"], *([n, n + 5, text] for n, text in enumerate(texts))]
            csv.writer(file, delimiter=parted).writerows(rows)
        assert read_captions(tmp_path / name) == read_captions(tmp_path / "a.txt") == texts
    assert read_captions(tmp_path / "a.tsv", 2) == texts[:2]
