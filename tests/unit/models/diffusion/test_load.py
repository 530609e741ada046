"""Folders of diffusers: round trips and errors."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpcai.errors import CheckpointError, ConfigError
from hpcai.models.diffusion import VAE, Condition, UNet, UNetConfig, VAEConfig, load_network, read_folder, save_folder
from hpcai.models.diffusion.config import DiffusionConfig, DiTConfig
from hpcai.models.diffusion.load import from_config, load_deferred
from hpcai.models.diffusion.model import Diffusion
from tests.reference_data import DATA, load_arrays, load_json

HOME = DATA / "diffusion" / "broken"
FILE, CONFIG = "diffusion_pytorch_model.safetensors", "config.json"
CONV = "mid_block.resnets.0.conv1.weight"


def change_config(folder: Path, **settings: Any) -> None:
    """Change settings of a folder; the value ... removes one."""
    config = json.loads((folder / CONFIG).read_text()) | settings
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_weights(change: Callable[[dict[str, Tensor]], Any], folder: Path) -> None:
    """Change the weights of a folder."""
    state = load_file(folder / FILE)
    change(state)
    save_file(state, folder / FILE, {"format": "pt"})


def change_file(change: Callable[[bytes], bytes], name: str = FILE) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def insert_nan(state: dict[str, Tensor]) -> None:
    state[CONV].view(-1)[7] = float("nan")


FAULTS: dict[str, tuple[Callable[[Path], Any], type[Exception], tuple[str, ...]]] = {
    "extra key": (partial(change_weights, lambda x: x.update(conv3=torch.ones(4))), CheckpointError,
                  (FILE, "has conv3, which no module")),
    "a setting that is missing": (partial(change_config, in_channels=...), CheckpointError, (CONFIG, "has no 'in_channels'")),
    "not finite": (partial(change_weights, insert_nan), CheckpointError, (FILE, CONV, "not finite")),
    "a pointer": (
        change_file(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 36760\n"), CheckpointError,
        (FILE, "git lfs pull"),
    ),
    "no weights": (lambda folder: (folder / FILE).unlink(), CheckpointError, (FILE, "does not exist")),
    "a pickle": (lambda folder: (folder / FILE).rename(folder / "diffusion_pytorch_model.fp16.bin"), CheckpointError,
                 ("model.fp16.bin: a pickle", "diffusers.AutoModel.from_pretrained(", "variant='fp16')")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_folders_raise(fault: str, tmp_path: Path) -> None:
    damage, kind, texts = FAULTS[fault]
    folder = shutil.copytree(HOME / "ok", tmp_path / "net")
    damage(folder)
    for read in (read_folder, load_network):
        with pytest.raises(kind) as caught:
            read(folder)
        assert all(text in str(caught.value) for text in (str(folder), *texts)), caught.value


@pytest.mark.parametrize("folder", ["ok", "ok_sharded"])
def test_good_folders_are_read(folder: str) -> None:
    io = {name: torch.from_numpy(array) for name, array in load_arrays("diffusion/broken/ok_io").items()}
    net = load_network(HOME / folder)
    with torch.no_grad():
        y = net(io["sample"], io["timestep"], Condition(tokens=io["encoder_hidden_states"]))
    np.testing.assert_allclose(y, io["out_f32"], rtol=0, atol=2e-5)
    assert not net.training and net.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("folder", ["ok", "ok_sharded"])
def test_folders_of_half_precision_alone_are_read(folder: str, tmp_path: Path) -> None:
    path, expected = shutil.copytree(HOME / folder, tmp_path / "net"), read_folder(HOME / folder)[1]
    for file in path.glob("*.safetensors"):
        save_file({name: x.half() for name, x in load_file(file).items()}, file, {"format": "pt"})
    name = f"{FILE}.index.fp16.json" if folder == "ok_sharded" else FILE.replace(".", ".fp16.")
    (path / (FILE if folder == "ok" else f"{FILE}.index.json")).rename(path / name)
    cfg, state = read_folder(path)
    assert all(torch.equal(x, expected[name].half()) for name, x in state.items()) and state.keys() == expected.keys()
    model = load_deferred(Diffusion(DiffusionConfig(unet=cfg)), path, lambda model: model)
    assert torch.equal(model.network.conv_in.weight, expected["conv_in.weight"].half().float())


def test_settings_name_what_does_not_fit_and_harmless_ones_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"12 channels cannot make 5 groups \(attention_groups\)"):
        UNetConfig(**SMALL, attention_groups=5, attention=("none", "self"), middle="none", heads=(1, 1), tokens=None)
    config = {"_class_name": "Transformer2DModel", "attention_type": "default", "norm_type": "ada_norm_zero", "patch_size": 2,
              "attention_bias": True, "activation_fn": "gelu-approximate", "norm_elementwise_affine": False, "in_channels": 4,
              "num_attention_heads": 2, "num_layers": 1, "sample_size": 8, "num_embeds_ada_norm": 5}  # fmt: skip
    assert from_config(config, tmp_path)[1] == DiTConfig(outputs=4, size=8, heads=2, layers=1, classes=5)
    with pytest.raises(ConfigError, match="attention_type is"):
        from_config(config | {"attention_type": "gated"}, tmp_path)


def test_damaged_indices_raise(tmp_path: Path) -> None:
    folder = shutil.copytree(HOME / "ok_sharded", tmp_path / "net")
    index = folder / f"{FILE}.index.json"
    content = json.loads(index.read_text())
    other = max(content["weight_map"].values())
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"conv_in.bias": other}}))
    with pytest.raises(CheckpointError, match=rf"index.json: conv_in.bias is not in {other}, as the index says"):
        read_folder(folder)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="expected an index of safetensors files with a weight_map"):
        read_folder(folder)


@pytest.mark.parametrize(("name", "value"), load_json("refused/diffusers_settings"))
def test_unsupported_settings_are_named(name: str, value: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(HOME / "ok", tmp_path / "net")
    change_config(folder, **{name: value})
    with pytest.raises(ConfigError, match=rf"config.json: {name} "):
        read_folder(folder)


SMALL: dict[str, Any] = {"channels": (8, 12), "groups": 4, "blocks": 1}
NETS = {
    "cross": UNetConfig(**SMALL, attention=("none", "cross"), heads=(2, 3), tokens=6, classes=3),
    "self": UNetConfig(**SMALL, attention=("none", "self"), middle="self", heads=(1, 3), tokens=None, field=2, dropout=0.1),
    "none": UNetConfig(**SMALL, attention=("none", "none"), middle="none", heads=(1, 1), tokens=None),
    "vae": VAEConfig(**SMALL, latents=2, shift=0.5, scale=0.3, quantised=False, attention=False),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("shard", [10**9, 5000])
def test_written_folders_are_read_again(name: str, shard: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cfg = NETS[name]
    net = UNet(cfg) if isinstance(cfg, UNetConfig) else VAE(cfg)
    save_folder({key: torch.zeros_like(value) for key, value in net.state_dict().items()}, cfg, tmp_path, 10**9 + 5000 - shard)
    save_folder(net.state_dict(), cfg, tmp_path, shard)  # overwrites the first
    loaded = load_network(tmp_path)
    assert loaded.cfg.model_dump(exclude={"zero"}) == cfg.model_dump(exclude={"zero"}) and type(loaded) is type(net)
    assert all(torch.equal(own, net.state_dict()[key]) for key, own in loaded.state_dict().items())


def test_networks_without_a_class_of_diffusers_are_not_written(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "attention": ("none", "self"), "middle": "self", "heads": (1, 3), "tokens": None}
    for change, text in (
        ({"dims": 3}, "dims 3"), ({"periodic": (True, False)}, "periodic"), ({"parameters": 2}, "parameters"),
        ({"attention_groups": 2}, "attention_groups 2 beside groups 4"), ({"attention": ("self", "self")}, "heads"),
        ({"attention": ("none", "cross"), "tokens": 4}, "in the middle"), ({"fine": 2}, "fine"),
    ):  # fmt: skip
        cfg = UNetConfig(**(settings | change))
        with pytest.raises(CheckpointError, match=text):
            save_folder(UNet(cfg).state_dict(), cfg, tmp_path / "net")
        assert not (tmp_path / "net").exists()
