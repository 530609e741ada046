"""Conversion of images and MLPerf's layouts to latents: rows equal the networks' outputs, resumption, and refusals."""

import io
import json
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from data_prep import captioned, encoders, latents, store
from hpcai import dist
from hpcai.data.splits import open_split
from hpcai.errors import DataError, MissingExtraError
from hpcai.models.diffusion import VAE, VAEConfig, load_network, save_folder
from hpcai.settings import LoaderConfig
from tests.captions import WORDS, save_text_encoders
from tests.data_prep.prep_contract import check_error, columns, content, damage, read_json, write_files
from tests.reference_data import load_json

_REASON = "transformers is not installed: captions are NOT tested; pip install hpcai-suite[latents]"
transformers: Any = pytest.importorskip("transformers", reason=_REASON)
pytestmark = pytest.mark.usefixtures("quiet_hugging_face")

SIZE, SIDE, L, N = 16, 4, 2, 7
IMAGES, POSITIONS, J, POOLED = 10, 9, 8, 12
SMALL = ["--size", SIZE, "--validation", 3, "--rows", 3, "--batch", 2, "--length", N, "--workers", 2, "--device", "cpu"]


# ---- networks


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the folders of a pipeline like Flux.1's."""
    folder = tmp_path_factory.mktemp("networks") / "pipeline"
    torch.manual_seed(0)
    cfg = VAEConfig(latents=L, channels=(8, 8, 8), blocks=1, groups=2, scale=0.5, shift=0.1, quantised=False)
    save_folder(VAE(cfg).state_dict(), cfg, folder / "vae")
    save_text_encoders(folder, "flux")
    return folder


# ---- sources


def picture(number: int, height: int = SIZE + 4, width: int = SIZE + 9) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def encode(pixels: np.ndarray, kind: str = "png") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def caption(number: int) -> str:
    return " ".join(WORDS[(number + n) % len(WORDS)] for n in range(1 + number % 5))


def write_tar(path: Path, members: Mapping[str, bytes | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def write_images(folder: Path, count: int = IMAGES) -> Path:
    """Write a folder of images with captions beside them."""
    files: dict[str, bytes | str] = {f"{n:02}.txt": caption(n) + "\n" for n in range(count)}
    for n in range(count):
        files |= {f"{n:02}.npy": npy(picture(n))} if n % 3 else {f"{n:02}.png": encode(picture(n))}
    return write_files(folder, files)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("source") / "images")


def convert(*args: object) -> int:
    return int(latents.main(["convert", *map(str, args)]))


@pytest.fixture(scope="module")
def dataset(source: Path, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("latents") / "dataset"
    assert convert(source, out, "--model", pipeline, *SMALL) == 0
    return out


# ---- expected rows


def expected_image(pixels: np.ndarray, size: int = SIZE) -> torch.Tensor:
    """Return the input of the autoencoder."""
    image = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None] / 127.5 - 1
    height, width = image.shape[2:]
    factor = size / min(height, width)
    sides = round(height * factor), round(width * factor)
    smaller = torch.nn.functional.interpolate(image, sides, mode="bicubic", antialias=True)
    top, left = ((side - size) // 2 for side in smaller.shape[2:])
    return smaller.clamp(-1, 1)[:, :, top : top + size, left : left + size]


@cache
def networks(pipeline: Path) -> tuple[Any, Any, Any, Any, Any]:
    clip, t5 = (getattr(transformers, name).from_pretrained(pipeline / part).eval().float()
                for name, part in (("CLIPTextModel", "text_encoder"), ("T5EncoderModel", "text_encoder_2")))  # fmt: skip
    tokenizer, tokenizer_2 = (transformers.AutoTokenizer.from_pretrained(pipeline / part) for part in ("tokenizer", "tokenizer_2"))
    return load_network(pipeline / "vae"), clip, tokenizer, t5, tokenizer_2


@torch.no_grad()
def expected_row(pipeline: Path, number: int, text: str | None = None) -> dict[str, torch.Tensor]:
    vae, clip, tokenizer, t5, tokenizer_2 = networks(pipeline)
    posterior, text = vae.encode(expected_image(picture(number))), caption(number) if text is None else text
    ids = [tokenize(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
           for tokenize, length in ((tokenizer, POSITIONS), (tokenizer_2, N))]  # fmt: skip
    return {"moments": torch.cat((posterior.mean, posterior.logvar), 1)[0], "pooled": clip(ids[0]).pooler_output[0],
            "tokens": t5(ids[1]).last_hidden_state[0]}  # fmt: skip


def split_numbers(count: int = IMAGES, held_out: int = 3) -> dict[str, list[int]]:
    mask = latents.validation_mask(count, held_out, 0)
    return {"train": np.flatnonzero(~mask).tolist(), "validation": np.flatnonzero(mask).tolist()}


def check_rows(out: Path, pipeline: Path, names: Sequence[str] = ("moments", "tokens", "pooled"), count: int = IMAGES) -> None:
    for split, numbers in split_numbers(count).items():
        rows = columns(out / split)
        assert sorted(rows) == sorted([*names, "sizes"]) and len(rows["moments"]) == len(numbers)
        assert (rows["sizes"] == [SIZE + 4, SIZE + 9, 0, 2, SIZE, SIZE]).all() and rows["sizes"].dtype == np.int64
        for row, number in enumerate(numbers):
            expected = expected_row(pipeline, number)
            for name in names:
                assert rows[name].dtype == np.float16
                assert rows[name][row] == pytest.approx(expected[name].numpy(), rel=2e-3, abs=2e-3), (split, number, name)


# ---- images


def test_rows_equal_the_outputs_of_the_networks(dataset: Path, pipeline: Path) -> None:
    check_rows(dataset, pipeline)
    pair = expected_row(pipeline, 1), expected_row(pipeline, 2)
    assert all((pair[0][name] - pair[1][name]).abs().max() > 0.02 for name in pair[0])     # samples differ
    with np.load(dataset / "nothing.npz") as empty:
        assert sorted(empty) == ["pooled", "tokens"]
        for name, values in empty.items():
            expected = expected_row(pipeline, 0, "")[name].numpy()
            assert values.dtype == np.float16 and values == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_the_index_has_all_metadata_of_a_model(dataset: Path, pipeline: Path) -> None:
    index = read_json(dataset / "train" / "index.json")
    vae, tokens, pooled = (encoders.identity(pipeline / part) for part in ("vae", "text_encoder_2", "text_encoder"))
    expected = {"kind": "latents", "scale": 0.5, "shift": 0.1, "latents": L, "size": [SIDE, SIDE], "image": [SIZE, SIZE],
                "tokens": [N, J], "pooled": POOLED, "vae": vae, "encoders": [tokens, pooled]}  # fmt: skip
    assert {name: index[name] for name in expected} == expected and read_json(dataset / "validation" / "index.json")["vae"] == vae
    assert vae == f"vae {store.digest(pipeline / 'vae' / 'diffusion_pytorch_model.safetensors')[:12]}"
    assert index["fields"]["moments"] == {"dtype": "float16", "shape": [2 * L, SIDE, SIDE], "key": True}
    part = read_json(dataset / "statistics.json")["splits"]["train"]
    means = columns(dataset / "train")["moments"][:, :L].astype(float)
    assert part["means"]["mean"] == pytest.approx(means.mean((0, 2, 3)), abs=1e-6)
    assert part["rows"] == 7 and part["cut"] == {"tokens_cut": 0, "pooled_cut": 0, "over_white": 0}


def test_a_stopped_run_resumes_and_ranks_write_the_same_bytes(
    dataset: Path, source: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, command = tmp_path / "out", [source, tmp_path / "out", "--model", pipeline, *SMALL]
    files, write_latents = list[Path](), latents.write_latents

    def write_two(*args: Any) -> None:
        if len(files) == 2:
            raise KeyboardInterrupt
        files.append(args[-1])
        write_latents(*args)

    monkeypatch.setattr(latents, "write_latents", write_two)
    with pytest.raises(KeyboardInterrupt):
        convert(*command)
    assert len(list(out.glob("*/*.h5"))) == 2
    monkeypatch.setattr(latents, "write_latents", lambda *args: files.append(args[-1]) or write_latents(*args))
    assert convert(*command) == 0 and content(out) == content(dataset) and len(files) == len({*files}) == 4
    monkeypatch.setenv("PMI_SIZE", "2")
    shutil.copytree(out / ".work", tmp_path / "ranks" / ".work")                # concurrent ranks would each write a part of it
    for rank in "10":
        monkeypatch.setenv("PMI_RANK", rank)
        assert convert(source, tmp_path / "ranks", "--model", pipeline, *SMALL) == 0
    assert content(tmp_path / "ranks") == content(dataset)


def write_webdataset(folder: Path) -> Path:
    for part in range(2):
        members: dict[str, bytes | str] = {"./._00.png": b"of another system, not read"}
        for n in range(part * 5, part * 5 + 5):
            members |= {f"./{n:02}.txt": caption(n), f"./{n:02}.png": encode(picture(n))}
        write_tar(folder / f"{part:05}.tar", members)
    return write_files(folder, {"00000.parquet": b"of img2dataset, not read"})


def test_a_webdataset_gives_the_same_rows(pipeline: Path, tmp_path: Path) -> None:
    assert convert(write_webdataset(tmp_path / "in"), tmp_path / "out", "--model", pipeline, *SMALL) == 0
    check_rows(tmp_path / "out", pipeline)


def test_encoders_are_named_separately_and_captions_may_be_absent(
    source: Path, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["--tokens", pipeline / "text_encoder"]                            # its tokenizer is in the folder beside it
    assert convert(source, tmp_path / "one", "--vae", pipeline / "vae", *tokens, *SMALL) == 0
    rows, (_, clip, tokenizer, _, _) = columns(tmp_path / "one" / "train"), networks(pipeline)
    text = caption(split_numbers()["train"][2])
    ids = tokenizer(text, padding="max_length", max_length=N, return_tensors="pt").input_ids
    assert rows["tokens"][2] == pytest.approx(clip(ids).last_hidden_state[0].detach().numpy(), rel=2e-3, abs=2e-3)
    half = shutil.copytree(pipeline / "text_encoder", tmp_path / "text_encoder")
    (half / "model.safetensors").rename(half / "model.fp16.safetensors")
    network, _ = encoders.load_pretrained(half, pipeline / "tokenizer", "CLIPTextModel", "a test")
    assert torch.equal(network(ids).last_hidden_state, clip(ids).last_hidden_state)
    plain = write_files(tmp_path / "bare", {f"{n}.png": encode(picture(n)) for n in range(IMAGES)})
    capsys.readouterr()
    assert convert(plain, tmp_path / "two", "--model", pipeline, *SMALL) == 0 and "there are no captions" in capsys.readouterr().out
    check_rows(tmp_path / "two", pipeline, ["moments"])
    assert (read_json(tmp_path / "two" / "train" / "index.json")["tokens"] is None
            and not (tmp_path / "two" / "nothing.npz").exists())  # fmt: skip
    assert convert(source, tmp_path / "three", "--vae", pipeline / "vae", *SMALL) == 0
    assert "10 captions are left out" in capsys.readouterr().out
    check_rows(tmp_path / "three", pipeline, ["moments"])


def test_long_captions_and_transparent_unread_or_damaged_images_are_counted(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_images(tmp_path / "in")
    long = (folder / "04.txt").write_text("cat " * 20) and "cat " * 20
    (folder / "06.png").write_bytes(encode(np.dstack([picture(6), picture(7)[..., 0]])))
    (folder / "6.tif").write_bytes(encode(picture(6), "tiff"))
    (folder / "03.png").write_bytes(encode(picture(3))[:90])
    args = [folder, tmp_path / "out", "--model", pipeline, *SMALL]
    assert convert(*args) == 2
    error = capsys.readouterr().err
    assert f"{folder / '03.png'}: cannot be read as an image" in error and "leave such items out with --skip-bad" in error
    assert convert(*args[:1], tmp_path / "truncated", *args[2:], "--long", "cut", "--skip-bad") == 0
    output = capsys.readouterr().out
    split = "train" if 4 in split_numbers()["train"] else "validation"
    assert f"{split}: 1 captions were truncated for tokens" in output and f"{split}: 1 captions were truncated for pooled" in output
    assert "1 images had transparent pixels" in output and "refused: 2 of 11 items: " in output
    assert "6.tif: .tif is not read; convert it to .png" in output and "03.png: cannot be read as an image" in output
    row = [number for number in split_numbers()[split] if number != 3].index(4)
    expected = expected_row(pipeline, 4, long)["tokens"].numpy()
    assert columns(tmp_path / "truncated" / split)["tokens"][row] == pytest.approx(expected, abs=2e-3)


def test_bad_samples_are_left_out_and_a_mended_source_is_listed_again(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, args = write_images(tmp_path / "in"), ["--model", pipeline, *SMALL]
    npys = [npy(values) for values in (picture(2), np.zeros((8, 8), np.float32))]
    bad = {"00.png": b"", "01.txt": b"\xff", "02.npy": npys[0][:200], "03.png": encode(picture(3))[:90], "04.txt": "cat " * 20}
    (write_files(folder, bad) / "05.txt").unlink()
    assert convert(folder, tmp_path / "out", *args, "--skip-bad") == 0
    reasons = sorted(read_json(tmp_path / "out" / "skipped.json")["unusable"].items())
    long = f"a caption of 21 tokens, {pipeline / 'text_encoder_2'} takes {N}"
    texts = "cannot be read", "byte 0xff is not UTF-8", "not a complete .npy", "cannot be read", long, "no caption"
    assert [Path(path).stem for path, _ in reasons] == [f"{n:02}" for n in range(6)]
    assert all(text in reason for (_, reason), text in zip(reasons, texts))
    for split, numbers in split_numbers().items():
        rows, expected = columns(tmp_path / "out" / split), [expected_row(pipeline, n) for n in numbers if n > 5]
        assert {len(values) for values in rows.values()} == {len(expected)}
        assert all(rows[name][n] == pytest.approx(row[name].numpy(), abs=2e-3) for n, row in enumerate(expected) for name in row)
    assert convert(folder, tmp_path / "two", *args) == 2 and "05.npy: no caption" in capsys.readouterr().err
    for name in [*bad, "01.npy", "04.npy", "05.npy"]:
        (folder / name).unlink()
    assert convert(folder, tmp_path / "two", *args, "--validation", 1) == 0     # by a new listing
    tars, out = write_stable_diffusion(tmp_path / "tars")[0], tmp_path / "three"
    CHANGES["NaN"](tars)
    (write_tar(tars / "00002.tar", {"a.npy": npys[1]}).parent / "00000.tar").write_bytes(bytes(3000))
    assert convert(tars, out, *SMALL, "--skip-bad") == 0
    unusable = read_json(out / "skipped.json")["unusable"]
    assert sorted(Path(path.split(": ")[0]).name for path in unusable) == ["00000.tar", "00001.tar", "00002.tar"]
    assert convert(tars, out, *SMALL) == 2 and "00000.tar: " in capsys.readouterr().err


def test_linked_folders_are_read_once_and_animated_images_are_refused(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "in", {"a/1.png": encode(picture(1)), ".b/2.png": b"", "c/.3.png": b""})
    write_files(tmp_path / "other", {"4.jpg": encode(picture(4), "jpeg"), "6.gif": b"", "deep/5.tar": b""})
    for link, target in (("link", tmp_path / "other"), ("link/deep/up", folder), ("a/again", folder / "a")):
        (folder / link).symlink_to(target)
    assert captioned.find_shards(folder) == [captioned.Shard(folder / "link/deep/5.tar")]
    (folder / "link/deep/5.tar").unlink()
    assert (shards := captioned.find_shards(folder)) == [captioned.Shard(folder, ("a/1.png", "link/4.jpg"))]
    assert captioned.list_unread(shards) == [(str(folder / "link/6.gif"), ".gif is not read; convert it to .png")]
    for kind in ("PNG", "WEBP", "MPO"):
        others = [Image.fromarray(picture(n)) for n in range(1, 3)]
        Image.fromarray(picture(0)).save(buffer := io.BytesIO(), kind, save_all=True, append_images=others)
        with nullcontext() if kind == "MPO" else pytest.raises(DataError, match="moving: an animated image"):
            image = captioned.resize_and_crop(captioned.Sample("moving", image=buffer.getvalue()), (20, 25), False)
            assert ((image + 1) * 127.5 - torch.from_numpy(picture(0)).permute(2, 0, 1)).abs().mean() < 60


def test_images_are_rotated_by_exif_and_fill_the_size(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6                                                            # the camera was turned
    upright = np.zeros((30, 20, 3), np.uint8)
    upright[:15] = 255                                                             # light above
    Image.fromarray(np.rot90(upright).copy()).save(path, exif=exif, quality=95)
    resized = captioned.resize_and_crop(captioned.Sample("x", image=path.read_bytes()), (20, 16), False)
    larger = captioned.resize_and_crop(captioned.Sample("x", image=path.read_bytes()), (60, 40), True)
    assert larger.shape == (3, 60, 40) and larger[:, :26].min() > 0.8 and larger[:, 34:].max() < -0.8
    assert resized.shape == (3, 20, 16) and resized[:, :8].min() > 0.8 and resized[:, -8:].max() < -0.8
    gray = Image.fromarray(np.full((16, 16), 200, np.uint8))
    gray.save(tmp_path / "gray.webp", lossless=True)
    resized = captioned.resize_and_crop(captioned.Sample("x", image=(tmp_path / "gray.webp").read_bytes()), (16, 16), False)
    assert (resized == torch.tensor(200 / 127.5 - 1)).all()


@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "PNG"), ("RGBA", "WEBP"), ("LA", "PNG"), ("PA", "PNG")])
def test_transparent_pixels_are_laid_over_white(mode: str, kind: str) -> None:
    def decode(hidden: int) -> torch.Tensor:
        pixels = np.full((16, 16, 4), (hidden, hidden, hidden, 0), np.uint8)
        pixels[:, 8:] = (40, 40, 40, 255)
        pixels[:, 12:, 3] = 128 if mode != "PA" else 255
        image = Image.fromarray(pixels).quantize() if mode == "PA" else Image.fromarray(pixels).convert(mode)
        image.save(buffer := io.BytesIO(), kind, lossless=True, exact=True)
        sample = captioned.Sample("x", image=buffer.getvalue())
        result = captioned.resize_and_crop(sample, (16, 16), False)
        assert sample.over_white
        return (result * 127.5 + 127.5).round()

    image = decode(0)
    assert (image == decode(200)).all() and (image[:, :, :8] == 255).all() and (image[:, :, 8:12] == 40).all()
    assert (image[:, :, 12:] == (40 if mode == "PA" else 147)).all()


def test_an_opaque_alpha_changes_nothing_and_16_bits_are_refused() -> None:
    opaque = captioned.Sample("x", image=encode(np.dstack([picture(1), np.full_like(picture(1)[..., 0], 255)])))
    plain = captioned.Sample("x", image=encode(picture(1)))
    assert torch.equal(*(captioned.resize_and_crop(sample, (SIZE, SIZE), False) for sample in (opaque, plain)))
    assert not opaque.over_white
    header = struct.pack(">4sIIBBBBB", b"IHDR", 16, 16, 16, 2, 0, 0, 0)
    parts = (header, b"IDAT" + zlib.compress(bytes(16 * (1 + 16 * 6))), b"IEND")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts
    )
    assert np.asarray(Image.open(io.BytesIO(data))).dtype == np.uint8, "Pillow drops the lower bits"
    with pytest.raises(DataError, match="scan.png: pixels of more than 8 bits"):
        captioned.resize_and_crop(captioned.Sample("scan.png", image=data), (16, 16), False)


# ---- MLPerf's layouts


def write_stable_diffusion(folder: Path, shape: tuple[int, ...] = (1, 8, 8, 8)) -> tuple[Path, np.ndarray]:
    """Write tars of moments and captions, and return the folder and the moments."""
    values = np.random.default_rng(5).normal(size=(IMAGES, *shape)).astype(np.float32)
    values[3, 0, 4:], values[4, 0, 4:] = -40, 30                                # beyond the autoencoder's clamp
    for part in range(2):
        members: dict[str, bytes | str] = {}
        for n in range(part * 5, part * 5 + 5):
            members |= {f"{n:09}.txt": caption(n), f"{n:09}.npy": npy(values[n])}
        write_tar(folder / f"{part:05}.tar", members)
    return folder, values[:, 0]


def test_stable_diffusion_of_mlperf_is_copied(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, values = write_stable_diffusion(tmp_path / "in")
    assert convert(folder, tmp_path / "out", "--tokens", pipeline / "text_encoder_2", *SMALL) == 0
    for split, numbers in split_numbers().items():
        rows = columns(tmp_path / "out" / split)
        assert (rows["moments"][:, :4] == values[numbers, :4].astype(np.float16)).all() and sorted(rows) == ["moments", "tokens"]
        assert (rows["moments"][:, 4:] == values[numbers, 4:].clip(-30, 20).astype(np.float16)).all()
        for row, number in enumerate(numbers):
            assert rows["tokens"][row] == pytest.approx(expected_row(pipeline, number)["tokens"].numpy(), rel=2e-3, abs=2e-3)
    index = read_json(tmp_path / "out" / "train" / "index.json")
    expected = {"scale": 0.18215, "shift": 0, "latents": 4, "size": [8, 8], "image": [64, 64], "vae": "mlperf"}
    assert {name: index[name] for name in expected} == expected
    assert index["pooled"] is None and index["encoders"] == [encoders.identity(pipeline / "text_encoder_2")]
    assert "expected about 1; is the scale" in capsys.readouterr().out           # the deviation of these is 0.18


def flux_row(number: int, level: int | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a row in the published format, and its values: small integers, equal in bfloat16 and float16."""
    rng = np.random.default_rng(number)
    values = {name: rng.integers(-20, 20, shape).astype(np.float32) for name, shape in
              (("mean", (16, 4, 4)), ("logvar", (16, 4, 4)), ("t5_encodings", (5, 6)), ("clip_encodings", (3,)))}  # fmt: skip
    bits = {name: npy((array.view(np.uint32) >> 16).astype(np.uint16)) for name, array in values.items()}
    row = {"__key__": f"key{number}", **bits, "timestep": level}
    return row, {"moments": np.concatenate((values["mean"], values["logvar"])), "tokens": values["t5_encodings"],
                 "pooled": values["clip_encodings"]}  # fmt: skip


SCHEMA = pa.schema([("__key__", pa.string()), *((name, pa.binary()) for name in captioned.COLUMNS), ("timestep", pa.int32())])


def write_arrow(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a table as datasets.save_to_disk does."""
    folder.mkdir(parents=True)
    names = []
    for part in range(2):
        names.append(f"data-{part:05}-of-00002.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as stream:
            half = list(rows[part * len(rows) // 2 : (part + 1) * len(rows) // 2])
            for begin in range(0, len(half), 2):
                stream.write_table(pa.Table.from_pylist(half[begin : begin + 2], SCHEMA))
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None}
    return write_files(folder, {"state.json": json.dumps(state), "dataset_info.json": "{}"})


def write_flux(root: Path) -> Path:
    write_arrow(root / "cc12m_preprocessed", [flux_row(n, None)[0] for n in range(9)])
    write_arrow(root / "coco_preprocessed", [flux_row(100 + n, n % 8)[0] for n in range(16)])
    empty = {"t5_empty.npy": npy(np.full((1, 5, 6), 0.5, np.float16)), "clip_empty.npy": npy(np.full((1, 3), 2, np.float16))}
    write_files(root / "empty_encodings", empty)
    return root


def test_flux_of_mlperf_is_copied(tmp_path: Path) -> None:
    assert convert(write_flux(tmp_path / "in"), tmp_path / "out", "--rows", 4, "--workers", 2) == 0
    for split, first, count in (("train", 0, 9), ("validation", 100, 16)):
        rows = columns(tmp_path / "out" / split)
        for n in range(count):
            for name, values in flux_row(first + n, None)[1].items():
                values = np.concatenate((values[:16], values[16:].clip(-30, 20))) if name == "moments" else values
                assert (rows[name][n] == values).all()
        assert len(rows["moments"]) == count and ("level" in rows) == (split == "validation")
    assert rows["level"].dtype == np.int64 and rows["level"].tolist() == [n % 8 for n in range(16)]
    index = read_json(tmp_path / "out" / "validation" / "index.json")
    expected = {"scale": 0.3611, "shift": 0.1159, "latents": 16, "size": [4, 4], "image": [32, 32], "tokens": [5, 6], "pooled": 3,
                "vae": "mlperf", "encoders": ["mlperf"]}  # fmt: skip
    assert {name: index[name] for name in expected} == expected
    with np.load(tmp_path / "out" / "nothing.npz") as empty:
        assert (empty["tokens"] == np.full((5, 6), 0.5)).all() and (empty["pooled"] == np.full(3, 2)).all()
    fields = {"moments": ("float16", (32, None, None)), "level": ("int64", ())}
    rows = open_split(tmp_path / "out" / "validation", fields, "", LoaderConfig(), dist.single_process())
    assert rows.read(11)["level"] == 3
    rows.close()


def test_levels_are_of_validation_alone_and_a_limit_takes_the_first_samples(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "in", [flux_row(n, n % 8)[0] for n in range(20)])
    assert convert(folder, tmp_path / "out", "--validation", 0.3, "--limit", 15, "--workers", 1) == 0
    train, validation = (columns(tmp_path / "out" / split) for split in ("train", "validation"))
    assert "level" not in train and len(train["moments"]) == 10
    numbers = np.flatnonzero(latents.validation_mask(15, 0.3, 0))
    assert validation["level"].tolist() == (numbers % 8).tolist() and len(numbers) == 5
    assert all((row == flux_row(int(n), None)[1]["tokens"]).all() for row, n in zip(validation["tokens"], numbers))


# ---- unusable sources


def truncate_tar(folder: Path, length: Callable[[int], int]) -> None:
    path = folder / "00001.tar"
    path.write_bytes(path.read_bytes()[: length(path.stat().st_size)])


def overwrite(name: str, data: bytes | str) -> Callable[[Path], None]:
    return lambda folder: write_files(folder, {name: data}) and None


def replace_moments(data: bytes, folder: Path) -> None:
    """Replace the moments of a sample of the second tar."""
    with tarfile.open(folder / "00001.tar") as file:
        members = {entry.name: file.extractfile(entry).read() for entry in file}    # type: ignore[union-attr]
    write_tar(folder / "00001.tar", {**members, "000000006.npy": data})


WRONG = load_json("refused/pictures")
CHANGES: dict[str, Callable[[Path], object]] = {
    "broken image": overwrite("06.png", encode(picture(6))[:300]),
    "broken npy": overwrite("05.npy", npy(picture(5))[:300]),
    "16 bits": lambda folder: Image.fromarray(np.zeros((20, 20), np.uint16)).save(folder / "06.png"),
    "floats": overwrite("05.npy", npy(np.zeros((20, 20, 3)))),
    "small image": overwrite("06.png", encode(picture(6, 20, 12))),
    "no caption": lambda folder: (folder / "07.txt").unlink(),
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
    "tar within a member": lambda folder: truncate_tar(folder, lambda size: 1800),
    "between members": lambda folder: truncate_tar(folder, lambda size: 512 + 512),
    "NaN": partial(replace_moments, npy(np.full((1, 8, 8, 8), np.nan, np.float32))),
    "too large": partial(replace_moments, npy(np.full((1, 8, 8, 8), 7e4, np.float32))),
    "another shape": partial(replace_moments, npy(np.zeros((1, 8, 8, 9), np.float32))),
    "no moments": partial(replace_moments, npy(np.zeros((8, 8), np.float32))),
    "an image": partial(replace_moments, npy(picture(1))),
    "arrow cut off": lambda folder: (lambda path: path.write_bytes(path.read_bytes()[:-3000]))(
        folder / "cc12m_preprocessed" / "data-00001-of-00002.arrow"),
    "arrow lost": lambda folder: (folder / "cc12m_preprocessed" / "data-00001-of-00002.arrow").unlink(),
    "empty caption": overwrite("empty_encodings/clip_empty.npy", npy(np.zeros((1, 4)))),
    "no time": lambda folder: write_arrow(folder / "val", [flux_row(n, None if n == 2 else n)[0] for n in range(4)]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_unusable_sources_are_refused_by_name(
    case: str, source: Path, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, options, error = WRONG[case]
    folder = tmp_path / "in"
    if layout == "images":
        shutil.copytree(source, folder)
    elif layout == "tars":
        write_stable_diffusion(folder)
    else:
        write_flux(folder)
    if case == "no time":
        shutil.rmtree(folder / "coco_preprocessed")
    if case in CHANGES:
        CHANGES[case](folder)
    names = {"clip": "text_encoder", "t5": "text_encoder_2", "vae": "vae"}
    options = [str(pipeline / names[option]) if option in names else option for option in options]
    model_options = {"images": ["--vae", pipeline / "vae", "--tokens", pipeline / "text_encoder_2"], "tars": [], "flux": []}[layout]
    if "--vae" in options and not options[-1]:
        options, model_options = [], []
    base_options = SMALL if layout != "flux" else ["--workers", 1]
    assert convert(folder, tmp_path / "out", *base_options, *model_options, *options) == 2
    check_error(capsys, error)
    assert not (tmp_path / "out" / "statistics.json").exists() or case == "empty caption"


@pytest.mark.parametrize(
    ("options", "error"),
    [(["--size", "20"], "size [16, 16] (now [20, 20])"), (["vae"], "vae vae "), (["text_encoder"], "encoders [")],
)
def test_a_folder_begun_with_other_settings_is_refused(
    dataset: Path, source: Path, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    if not options[0].startswith("-"):                                            # other weights
        other = shutil.copytree(pipeline, tmp_path / "pipeline")
        path = next((other / options[0]).glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1] + b"\x3d")
        pipeline, options = other, []
    before = content(dataset)
    assert convert(source, dataset, "--model", pipeline, *SMALL, *options) == 2
    output = capsys.readouterr().err
    assert f"{dataset}: was made with {error}" in output and "choose a new folder" in output and content(dataset) == before


def test_other_images_and_an_out_within_them_are_refused(
    dataset: Path, source: Path, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(write_images(tmp_path / "in", IMAGES + 1), dataset, "--model", pipeline, *SMALL) == 2
    assert "sources {'all': '10 files" in capsys.readouterr().err
    assert convert(source, source / "out", "--model", pipeline, *SMALL) == 2
    assert "OUT lies within SOURCE" in capsys.readouterr().err and not (source / "out").exists()


def test_without_transformers_the_error_names_the_extra(
    source: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders.load_networks.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"needs transformers: pip install 'hpcai-suite\[latents\]'"):
        encoders.load_networks(encoders.resolve_networks(pipeline, None, None, None, N, False, "float32", "cpu"))
    assert convert(source, tmp_path, "--vae", pipeline / "vae", *SMALL) == 0    # images need none


def test_an_encoder_without_some_of_its_weights_is_refused(source: Path, pipeline: Path, tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(pipeline, tmp_path / "pipeline")
    path = other / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    del weights[next(name for name in weights if "layers.1.mlp.fc1.weight" in name)]
    save_file(weights, path, {"format": "pt"})
    assert convert(source, tmp_path / "out", "--model", other, *SMALL) == 2
    assert "layers.1.mlp.fc1.weight, one of 1 weights of a CLIPTextModel" in capsys.readouterr().err


# ---- check


def test_the_check_draws_and_finds_damage(dataset: Path, tmp_path: Path, capsys: Any) -> None:
    out = shutil.copytree(dataset, tmp_path / "out")
    args = ["check", str(out)]
    assert latents.main(args) == 0
    assert (out / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert "10 samples against index.json: equal" in capsys.readouterr().out

    def spoil(file: h5py.File) -> None:
        file["moments"][0, L] = 21

    damage(out, spoil)
    np.savez(out / "nothing.npz", tokens=np.zeros((2, 2), np.float16))
    assert latents.main(args) == 1
    text = capsys.readouterr().out
    assert "variances outside -30 to 20" in text and "nothing.npz: tokens is [2, 2]" in text and text.count("wrong: ") == 2
    damage(out, lambda file: file["tokens"].__setitem__((1, 0, 0), np.inf))
    assert latents.main(args) == 1 and "'tokens' row 1 of 3 holds NaN or infinity" in capsys.readouterr().out
