"""Files that other programs wrote: bounded in size, depth and time, with errors of one line that name the file and its key."""

import io
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data_prep import captioned
from hpcai import log
from hpcai.errors import CheckpointError, ConfigError, DataError, HpcaiError
from hpcai.json_file import MAX_BYTES, read_object
from hpcai.models.diffusion import DiffusionConfig, UNetConfig, read_folder
from hpcai.models.diffusion import save_folder as save_network
from hpcai.models.diffusion.unet import UNet
from hpcai.models.llm import LLM, LLMConfig, chats, save_folder
from hpcai.models.llm.lora import read_adapter_config
from hpcai.models.llm.text import stop_tokens
from hpcai.nn.safetensors_files import open_tensors
from hpcai.nn.weights import load_state, read_settings

DEEP = "[" * 200_000
SMALL = LLMConfig(vocabulary=11, width=8, layers=1, heads=2, inner=8, positions=8)
UNET = UNetConfig(inputs=1, outputs=1, tokens=None, channels=(8, 8), blocks=1, attention=("none", "none"), middle="self",
                  heads=(1, 1), groups=4)  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_folder(LLM(SMALL).state_dict(), SMALL, tmp_path / "llama")
    return tmp_path / "llama"


def refusal(function: Callable[[Any], Any], argument: Any, *expected: str) -> None:
    """Assert that the function raises an error of hpcai with one line that contains each of ``expected``."""
    with pytest.raises(HpcaiError) as caught:
        function(argument)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400 and all(part in text for part in expected), text


@pytest.mark.parametrize("text, reason", [(DEEP, "nested too deeply"), ("[1]", "a JSON list"), ("{", "not JSON")])
def test_json_of_another_structure_is_refused_in_one_line(llama: Path, tmp_path: Path, text: str, reason: str) -> None:
    model = LLM.load(llama)
    vars(model)["_tokenizer"], model.folder = SimpleNamespace(eos=None), tmp_path
    for name, read in {
        "config.json": LLM.load, "generation_config.json": lambda folder: stop_tokens(model),
        "adapter_config.json": read_adapter_config, "model.safetensors.index.json": open_tensors,
        "unet/config.json": read_folder, "state.json": captioned.find_shards,
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        refusal(read, path.parent, str(path), reason)
        path.unlink()


def test_settings_in_a_safetensors_file_of_another_structure_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    cases = (DEEP, "nested too deeply"), ('{"model": "llm"}', "has no 'settings'"), ('{"model": "llm", "settings": 3}', "")
    for text, reason in cases:
        save_file({"x": torch.zeros(1)}, path, metadata={"hpcai": text})
        refusal(lambda path: read_settings(path, "llm", LLMConfig), path, f"{path}: settings inside the file", reason)
    text = json.dumps({"model": "diffusion", "settings": {"unet": {"blocks": 10**9}}})  # in a section
    save_file({"x": torch.zeros(1)}, path, metadata={"hpcai": text})
    refusal(lambda path: load_state(path, "diffusion", DiffusionConfig), path, "channels is (320", "the weights have 1 tensors")


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    refusal(lambda path: read_object(path, "settings"), tmp_path / "config.json", f"{MAX_BYTES + 1:,} bytes", "expected settings")


@pytest.mark.parametrize(
    "key, value", [("num_hidden_layers", 10**9), ("vocab_size", 10**18), ("intermediate_size", 10**12), ("vocab_size", 1e18),
                   ("rope_theta", float("inf")), ("model_type", ["llama"])],
)  # fmt: skip
def test_claims_of_a_config_are_refused_before_a_model_is_built(llama: Path, key: str, value: Any) -> None:
    config = json.loads((llama / "config.json").read_text())
    config = {name: item for name, item in config.items() if not name.startswith("rope")} | {key: value}
    (llama / "config.json").write_text(json.dumps(config))
    refusal(LLM.load, llama, "config.json", {"rope_theta": "theta", "model_type": "type"}.get(key, key))


@pytest.mark.parametrize(
    "key, value", [("layers_per_block", 10**9), ("in_channels", 10**18), ("block_out_channels", [8 * 10**11] * 2)]
)
def test_claims_of_a_network_of_diffusers_are_refused_before_it_is_built(tmp_path: Path, key: str, value: Any) -> None:
    save_network(UNet(UNET).state_dict(), UNET, tmp_path)
    assert read_folder(tmp_path)[0] == UNET
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    refusal(read_folder, tmp_path, "config.json", "the weights have")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_names_of_files_stay_inside_their_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    refusal(open_tensors, tmp_path, name, "outside its folder")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    refusal(captioned.find_shards, tmp_path, name, "outside its folder")


def test_links_of_a_download_cache_are_followed(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (llama / "model.safetensors").rename(tmp_path / "blobs/0123")
    (llama / "model.safetensors").symlink_to("../blobs/0123")
    assert torch.equal(LLM.load(llama).lm_head.weight, LLM.load(llama).lm_head.weight)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99) %}{% endfor %}{% endfor %}{% endfor %}x"
GROWS = "{% set ns = namespace(s='y') %}{% for a in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [(LOOPS, "is silent for 1 s"), (GROWS, "MemoryError"), ("{{ 'x'.ljust(10 ** 12) }}", "MemoryError"),
     ("{% for a in range(40) %}{{ 'xxxxxxxx' * 200000 }}{% endfor %}", "renders 64,000,000 characters")],
)  # fmt: skip
def test_a_chat_template_is_bounded_in_time_and_memory(monkeypatch: pytest.MonkeyPatch, template: str, reason: str) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(chats._renderer, "seconds", 1 if template == LOOPS else 60)
    messages = [{"role": "user", "content": "a"}]
    refusal(lambda template: chats.render(template, "t.json", messages, ()), template, "t.json: chat template", reason)
    assert chats.render("{{ messages[0].content }}!", "t.json", messages, ()).text == "a!", "the next one is rendered"


# ---- text


def test_names_with_control_characters_move_no_cursor_and_begin_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[2J\x9b\r\nINFO: finished.h5"
    assert str(DataError(f"{name}: is damaged")) == "a\\x1b[2J\\x9b\\r\nINFO: finished.h5: is damaged"
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s is read", (name,), None)
    assert log._Formatter("%(message)s").format(record) == "a\\x1b[2J\\x9b\\r\n  INFO: finished.h5 is read"
    log.Terminal(sys.stdout).write(log.Event("note", 0.0, {"step": 1, "text": name}))
    assert capsys.readouterr().out.endswith("a\\x1b[2J\\x9b\\r\n  INFO: finished.h5\n")


# ---- images


def sample(data: bytes) -> captioned.Sample:
    return captioned.Sample("a.png", image=data)


def test_only_png_jpeg_and_webp_are_decoded_whatever_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands an EPS to Ghostscript if there is one."""
    image = pytest.importorskip("PIL.Image").new("RGB", (16, 16), "red")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for form in ("EPS", "GIF", "PNG", "JPEG"):
        image.save(content := io.BytesIO(), form)
        if form in ("PNG", "JPEG"):
            assert captioned.resize_and_crop(sample(content.getvalue()), (16, 16), enlarge=False).shape == (3, 16, 16)
        else:
            refusal(lambda data: captioned.resize_and_crop(sample(data), (16, 16), enlarge=False), content.getvalue(), "a.png")
    assert not (tmp_path / "started").exists()


def test_a_thin_image_is_refused_before_it_is_enlarged() -> None:
    pytest.importorskip("PIL.Image").new("RGB", (1, 200_000)).save(content := io.BytesIO(), "PNG")
    image = sample(content.getvalue())
    refusal(lambda image: captioned.resize_and_crop(image, (64, 64), enlarge=True), image, "a.png: 200000 x 1", "crop it")


@pytest.mark.parametrize("shape", [(1 << 40, 3), (5, 3), (0, 3)])
def test_a_header_of_npy_is_compared_with_its_bytes(shape: tuple[int, ...]) -> None:
    np.save(content := io.BytesIO(), np.ones((4, 3), np.float32))
    data = content.getvalue()
    assert np.array_equal(captioned._load_npy(data, "a.npy"), np.ones((4, 3), np.float32))
    padding = " " * (len("(4, 3)") + 40 - len(str(shape)))
    forged = data.replace(b"(4, 3), }" + b" " * 40, f"{shape}, }}{padding}".encode())
    assert forged != data
    refusal(lambda data: captioned._load_npy(data, "a.npy"), forged, "a.npy", "not a complete .npy")


def test_errors_are_of_the_kinds_that_callers_expect(tmp_path: Path) -> None:
    for kind in (CheckpointError, ConfigError, DataError):
        with pytest.raises(kind, match="x.json: cannot be read .No such file or directory.; expected settings"):
            read_object(tmp_path / "x.json", "settings", kind)
