"""Weight files of every network: round trips, wrappers and prefixes of other codes, errors, and no execution of code."""

import json
import pickle
import traceback
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hpcai.errors import CheckpointError
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig
from hpcai.models.deepcam import DeepCam, DeepCamConfig
from hpcai.models.dimenet import DimeNet
from hpcai.models.openfold import OpenFold, OpenFoldConfig
from hpcai.models.unet3d import UNet3D, UNet3DConfig
from tests.atoms import SMALL

VOLUMES = UNet3DConfig(filters=(4, 6), window=(8, 16, 16), spacing_mm=(4.0, 2.0, 2.0))
NETWORKS: dict[Any, Any] = {
    CosmoFlow: CosmoFlowConfig(size=32, filters=2, low=(0.1, 0.5, 0.8, 50.0), high=(0.5, 1.0, 1.1, 90.0)),
    DeepCam: DeepCamConfig(divide=8, middle=1, low=(0.0,) * 16, high=(1.0,) * 16),
    DimeNet: SMALL.model_copy(update={"mean": -3.0, "scale": 2.0}), OpenFold: OpenFoldConfig.preset("tiny"), UNet3D: VOLUMES,
}  # fmt: skip
all_networks = pytest.mark.parametrize("kind", NETWORKS)
State = dict[str, torch.Tensor]


def network(kind: Any) -> Any:
    torch.manual_seed(0)
    model = kind(NETWORKS[kind])
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    return model


def equal_weights(a: Any, b: Any) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other_name and torch.equal(value, other_value) for (name, value), (other_name, other_value) in pairs)


@all_networks
def test_weights_and_settings_are_saved_in_one_file(kind: Any, tmp_path: Path) -> None:
    model, other = network(kind), network(kind)
    torch.nn.init.ones_(next(other.parameters()))
    for state, expected in ((None, model), (other.state_dict(), other)):  # a state dict in place of the model's own
        model.save(tmp_path / "w.safetensors", state)
        loaded = kind.load(tmp_path / "w.safetensors")
        assert loaded.cfg == model.cfg and not loaded.training and equal_weights(loaded, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@all_networks
def test_a_state_dict_needs_settings_for_the_rest(kind: Any, tmp_path: Path) -> None:
    model = network(kind)
    torch.save(model.state_dict(), tmp_path / "new.pt")
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "plain")
    for name in ("new.pt", "old.pt", "plain"):
        loaded = kind.load(tmp_path / name, model.cfg)
        assert loaded.cfg == model.cfg and not loaded.training and equal_weights(loaded, model)
    inferred = kind.load(tmp_path / "plain")
    assert equal_weights(inferred, model) and getattr(inferred.cfg, "low", None) is None


def add_prefix(prefix: str, weights: State) -> State:
    return {prefix + name: value for name, value in weights.items()}


WRAPPERS: dict[str, Any] = {
    "twice parallel": lambda w: add_prefix("module.module.", w),
    "compiled": lambda w: add_prefix("_orig_mod.", w),
    "averaged": lambda w: add_prefix("averaged_model.module.", w) | {"averaged_model.n_averaged": torch.tensor(3)},
    "submission": lambda w: {"model": add_prefix("module.", w), "step": 3, "epoch": 1, "optimizer": {"lr": 0.1}},
    "torch": lambda w: {"model_state_dict": w, "epoch": 3},
    "deepspeed": lambda w: {"module": add_prefix("_forward_module.model.", w), "dp_world_size": 8},
    "lightning with an average": lambda w: {
        "state_dict": {f"model.{name}": 0 * value for name, value in w.items()}, "ema": {"params": w, "decay": 0.999},
    },
    "mlperf": lambda w: {"iteration": 9, "alphafold_state_dict": w, "optimizer_state_dict": {"state": {0: torch.ones(())}}},
}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_are_found_in_checkpoints_and_behind_prefixes(wrapper: str, tmp_path: Path) -> None:
    model = network(UNet3D)
    torch.save(WRAPPERS[wrapper](model.state_dict()), tmp_path / "w.ckpt")
    assert equal_weights(UNet3D.load(tmp_path / "w.ckpt", VOLUMES), model)


def test_files_without_weights_or_with_duplicates_raise(tmp_path: Path) -> None:
    state, path = network(UNet3D).state_dict(), tmp_path / "w.pt"
    name = next(iter(state))
    changes = {"expected names with tensors": {name: "none"}, "several tensors of one name": {f"module.{name}": state[name]}}
    for text, change in changes.items():
        torch.save(state | change, path)
        with pytest.raises(CheckpointError, match=f"w.pt: {text}"):
            UNet3D.load(path)


# Settings that differ from the weights, the message of the error, and the names in the message of missing weights.
MISMATCHES: dict[Any, tuple[dict[str, Any], str, str]] = {
    CosmoFlow: ({"filters": 8}, "the weights have filters 2, the settings 8", "conv_seq.0.conv.weight, dense1.weight"),
    DeepCam: ({"divide": 4}, "the weights have divide 8, the settings 4", "of the reference .xception_features.conv1"),
    DimeNet: ({"hidden": 64}, "the weights have hidden 12, the settings 64", "of the reference .rbf.freq"),
    OpenFold: ({"pair": 24}, "with other shapes than those of the settings", "aux_heads"),
    UNet3D: ({"filters": (8, 6)}, r"the weights have filters \(4, 6\), the settings \(8, 6\)", "input_block.conv1.0.weight"),
}


@all_networks
def test_mismatched_weights_raise(kind: Any, tmp_path: Path) -> None:
    model, path = network(kind), tmp_path / "w.pt"
    torch.save(model.state_dict(), path)
    change, text, names = MISMATCHES[kind]
    with pytest.raises(CheckpointError, match=text):
        kind.load(path, model.cfg.model_copy(update=change))
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=f"w.pt: .*expected .*{names}"):
        kind.load(path)
    save_file({"x": torch.ones(2)}, path, metadata={"hpcai": json.dumps({"model": "ringdown", "settings": {}})})
    with pytest.raises(CheckpointError, match="holds a model of kind 'ringdown'; expected"):
        kind.load(path)
    with pytest.raises(CheckpointError, match="w.onnx: there is no form 'onnx' of weights; expected one of hpcai"):
        model.save(tmp_path / "w.onnx", form="onnx")
    for content in (b"", b"\x89HDF\r\n\x1a\nrubbish", b"\x00" * 100):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="w.pt"):
            kind.load(path)


def test_a_dense_kernel_of_other_dims_raises(tmp_path: Path) -> None:
    layers = {"conv3d": (3, 3, 3, 4, 2), "dense": (8,), "dense_1": (128, 64), "dense_2": (64, 4)}
    with h5py.File(tmp_path / "w.h5", "w") as file:
        for name, shape in layers.items():
            file[f"{name}/{name}/kernel:0"] = np.zeros(shape, np.float32)
            file[f"{name}/{name}/bias:0"] = np.zeros(shape[-1:], np.float32)
    with pytest.raises(CheckpointError, match=r"(?s)w\.h5: .*dense1\.weight"):
        CosmoFlow.load(tmp_path / "w.h5")


class Trap:
    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> Any:
        return Path.touch, (self.sprung,)


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"state_dict": {}, "hyper_parameters": Trap(sprung)}, tmp_path / "new.pt")
    torch.save({"a": Trap(sprung)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"a": Trap(sprung)}, protocol=2))
    arrays: Any = np.empty(1, object)
    arrays[0] = Trap(sprung)
    np.savez(tmp_path / "params.npz", **{"alphafold/alphafold_iteration/a//b": arrays})
    for name in ("new.pt", "old.pt", "bare.pt", "params.npz"):
        with pytest.raises(CheckpointError, match=name) as caught:
            OpenFold.load(tmp_path / name)
        message = "".join(traceback.format_exception(caught.value))
        assert "weights_only=False" not in message and "re-running" not in message and not sprung.exists()
    pickle.loads((tmp_path / "bare.pt").read_bytes())  # noqa: S301 the trap works
    assert sprung.exists()
