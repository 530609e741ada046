"""Images and MLPerf's layouts to moments and vectors: equal to the outputs of the networks, resumable, and refusals."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
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
from hpcai.errors import MissingExtraError
from hpcai.models.diffusion import VAE, VAEConfig, load_network, save_folder
from hpcai.settings import LoaderConfig
from tests.captions import WORDS, save_tokenizer
from tests.data_prep.prep_contract import columns, content, damage, read_json

_WHY = "transformers is not installed: captions are NOT tested; pip install hpcai-suite[latents]"
transformers: Any = pytest.importorskip("transformers", reason=_WHY)

SIZE, SIDE, L, N = 16, 4, 2, 7
IMAGES, PLACES, J, POOLED = 10, 9, 8, 12
SMALL = ["--size", SIZE, "--validation", 3, "--rows", 3, "--batch", 2, "--length", N, "--workers", 2, "--device", "cpu"]


# ---- networks


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the folders of a pipeline like Flux.1's."""
    folder = tmp_path_factory.mktemp("networks") / "pipeline"
    torch.manual_seed(0)
    cfg = VAEConfig(latents=L, channels=(8, 8, 8), blocks=1, groups=2, scale=0.5, shift=0.1, quantised=False)
    save_folder(VAE(cfg).state_dict(), cfg, folder / "vae")
    clip = transformers.CLIPTextConfig(
        vocab_size=20, hidden_size=POOLED, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=PLACES, eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    transformers.CLIPTextModel(clip).save_pretrained(folder / "text_encoder")
    t5 = transformers.T5Config(vocab_size=20, d_model=J, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    transformers.T5EncoderModel(t5).save_pretrained(folder / "text_encoder_2")
    save_tokenizer(folder / "tokenizer", True)
    save_tokenizer(folder / "tokenizer_2", False)
    return folder


# ---- sources


def picture(number: int, height: int = SIZE + 4, width: int = SIZE + 9) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def encoded(pixels: np.ndarray, kind: str = "png") -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


def npy(values: np.ndarray) -> bytes:
    held = io.BytesIO()
    np.save(held, values)
    return held.getvalue()


def caption(number: int) -> str:
    return " ".join(WORDS[(number + n) % len(WORDS)] for n in range(1 + number % 5))


def write(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def tar(path: Path, members: Mapping[str, bytes | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def plain(folder: Path, count: int = IMAGES) -> Path:
    """A folder of images with captions beside them."""
    files: dict[str, bytes | str] = {f"{n:02}.txt": caption(n) + "\n" for n in range(count)}
    for n in range(count):
        files |= {f"{n:02}.npy": npy(picture(n))} if n % 3 else {f"{n:02}.png": encoded(picture(n))}
    return write(folder, files)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(tmp_path_factory.mktemp("source") / "images")


def convert(*words: object) -> int:
    return int(latents.main(["convert", *map(str, words)]))


@pytest.fixture(scope="module")
def made(source: Path, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "whole"
    assert convert(source, out, "--model", pipeline, *SMALL) == 0
    return out


# ---- by hand


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
    one, two = (transformers.AutoTokenizer.from_pretrained(pipeline / part) for part in ("tokenizer", "tokenizer_2"))
    return load_network(pipeline / "vae"), clip, one, t5, two


@torch.no_grad()
def by_hand(pipeline: Path, number: int, text: str | None = None) -> dict[str, torch.Tensor]:
    vae, clip, one, t5, two = networks(pipeline)
    found, text = vae.encode(expected_image(picture(number))), caption(number) if text is None else text
    ids = [name(text, padding="max_length", max_length=most, truncation=True, return_tensors="pt").input_ids
           for name, most in ((one, PLACES), (two, N))]  # fmt: skip
    return {"moments": torch.cat((found.mean, found.logvar), 1)[0], "pooled": clip(ids[0]).pooler_output[0],
            "tokens": t5(ids[1]).last_hidden_state[0]}  # fmt: skip


def numbers(count: int = IMAGES, held: int = 3) -> dict[str, list[int]]:
    mask = latents.validation_mask(count, held, 0)
    return {"train": np.flatnonzero(~mask).tolist(), "validation": np.flatnonzero(mask).tolist()}


def same(out: Path, pipeline: Path, names: Sequence[str] = ("moments", "tokens", "pooled"), count: int = IMAGES) -> None:
    for split, these in numbers(count).items():
        rows = columns(out / split)
        assert sorted(rows) == sorted(names) and len(rows["moments"]) == len(these)
        for row, number in enumerate(these):
            expected = by_hand(pipeline, number)
            for name in names:
                assert rows[name].dtype == np.float16
                assert rows[name][row] == pytest.approx(expected[name].numpy(), rel=2e-3, abs=2e-3), (split, number, name)


# ---- images


def test_rows_equal_the_outputs_of_the_networks(made: Path, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same(made, pipeline)
    apart = by_hand(pipeline, 1), by_hand(pipeline, 2)
    assert all((apart[0][name] - apart[1][name]).abs().max() > 0.02 for name in apart[0])     # a row of another sample would show
    with np.load(made / "nothing.npz") as nothing:
        assert sorted(nothing) == ["pooled", "tokens"]
        for name, values in nothing.items():
            expected = by_hand(pipeline, 0, "")[name].numpy()
            assert values.dtype == np.float16 and values == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_the_index_has_all_metadata_of_a_model(made: Path, pipeline: Path) -> None:
    index = read_json(made / "train" / "index.json")
    vae, tokens, pooled = (encoders.identity(pipeline / part) for part in ("vae", "text_encoder_2", "text_encoder"))
    about = {"kind": "latents", "scale": 0.5, "shift": 0.1, "latents": L, "size": [SIDE, SIDE], "image": [SIZE, SIZE],
             "tokens": [N, J], "pooled": POOLED, "vae": vae, "encoders": [tokens, pooled]}  # fmt: skip
    assert {name: index[name] for name in about} == about and read_json(made / "validation" / "index.json")["vae"] == vae
    assert vae == f"vae {store.digest(pipeline / 'vae' / 'diffusion_pytorch_model.safetensors')[:12]}"
    assert index["fields"]["moments"] == {"dtype": "float16", "shape": [2 * L, SIDE, SIDE], "key": True}
    part = read_json(made / "statistics.json")["splits"]["train"]
    means = columns(made / "train")["moments"][:, :L].astype(float)
    assert part["means"]["mean"] == pytest.approx(means.mean((0, 2, 3)), abs=1e-6)
    assert part["rows"] == 7 and part["cut"] == {"tokens_cut": 0, "pooled_cut": 0}


def test_a_stopped_run_resumes_and_ranks_write_the_same_bytes(
    made: Path, source: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, work = tmp_path / "again", [source, tmp_path / "again", "--model", pipeline, *SMALL]
    files, write = list[Path](), latents.write_latents

    def stops(*words: Any) -> None:
        if len(files) == 2:
            raise KeyboardInterrupt
        files.append(words[-1])
        write(*words)

    monkeypatch.setattr(latents, "write_latents", stops)
    assert convert(*work) == 130 and len(list(out.glob("*/*.h5"))) == 2
    monkeypatch.setattr(latents, "write_latents", lambda *words: files.append(words[-1]) or write(*words))
    assert convert(*work) == 0 and content(out) == content(made) and len(files) == len({*files}) == 4
    monkeypatch.setenv("PMI_SIZE", "2")
    shutil.copytree(out / ".work", tmp_path / "ranks" / ".work")                # of which ranks that run at once make their parts
    for rank in "10":
        monkeypatch.setenv("PMI_RANK", rank)
        assert convert(source, tmp_path / "ranks", "--model", pipeline, *SMALL) == 0
    assert content(tmp_path / "ranks") == content(made)


def webdataset(folder: Path) -> Path:
    for part in range(2):
        members: dict[str, bytes | str] = {"./._00.png": b"of another system, not read"}
        for n in range(part * 5, part * 5 + 5):
            members |= {f"./{n:02}.txt": caption(n), f"./{n:02}.png": encoded(picture(n))}
        tar(folder / f"{part:05}.tar", members)
    return write(folder, {"00000.parquet": b"of img2dataset, not read"})


def test_a_webdataset_gives_the_same_rows(pipeline: Path, tmp_path: Path) -> None:
    assert convert(webdataset(tmp_path / "in"), tmp_path / "out", "--model", pipeline, *SMALL) == 0
    same(tmp_path / "out", pipeline)


def test_encoders_are_named_singly_and_captions_may_be_absent_everywhere(
    source: Path, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["--tokens", pipeline / "text_encoder"]                            # whose tokenizer is its neighbour
    assert convert(source, tmp_path / "one", "--vae", pipeline / "vae", *tokens, *SMALL) == 0
    rows, (_, clip, one, _, _) = columns(tmp_path / "one" / "train"), networks(pipeline)
    text = caption(numbers()["train"][2])
    ids = one(text, padding="max_length", max_length=N, return_tensors="pt").input_ids
    assert rows["tokens"][2] == pytest.approx(clip(ids).last_hidden_state[0].detach().numpy(), rel=2e-3, abs=2e-3)
    bare = write(tmp_path / "bare", {f"{n}.png": encoded(picture(n)) for n in range(IMAGES)})
    capsys.readouterr()
    assert convert(bare, tmp_path / "two", "--model", pipeline, *SMALL) == 0 and "there are no captions" in capsys.readouterr().out
    same(tmp_path / "two", pipeline, ["moments"])
    assert (read_json(tmp_path / "two" / "train" / "index.json")["tokens"] is None
            and not (tmp_path / "two" / "nothing.npz").exists())  # fmt: skip
    assert convert(source, tmp_path / "three", "--vae", pipeline / "vae", *SMALL) == 0
    assert "10 captions are left out" in capsys.readouterr().out
    same(tmp_path / "three", pipeline, ["moments"])


def test_long_captions_are_refused_by_name_or_truncated_and_counted(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plain(tmp_path / "in")
    long = (folder / "04.txt").write_text("cat " * 20) and "cat " * 20
    words = [folder, tmp_path / "out", "--model", pipeline, *SMALL]
    assert convert(*words) == 2
    assert f"{folder / '04.npy'}: a caption of 21 tokens, {pipeline / 'text_encoder_2'} takes {N}" in capsys.readouterr().err
    assert convert(*words[:1], tmp_path / "cut", *words[2:], "--long", "cut") == 0
    output = capsys.readouterr().out
    split = "train" if 4 in numbers()["train"] else "validation"
    assert f"{split}: 1 captions were truncated for tokens" in output and f"{split}: 1 captions were truncated for pooled" in output
    row = numbers()[split].index(4)
    assert columns(tmp_path / "cut" / split)["tokens"][row] == pytest.approx(by_hand(pipeline, 4, long)["tokens"].numpy(), abs=2e-3)


def test_images_are_rotated_by_exif_and_fill_the_size(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6                                                            # the camera was turned
    seen = np.zeros((30, 20, 3), np.uint8)
    seen[:15] = 255                                                             # light above
    Image.fromarray(np.rot90(seen).copy()).save(path, exif=exif, quality=95)
    found = captioned.resize_and_crop(captioned.Sample("x", image=path), (20, 16), False)
    larger = captioned.resize_and_crop(captioned.Sample("x", image=path), (60, 40), True)
    assert larger.shape == (3, 60, 40) and larger[:, :26].min() > 0.8 and larger[:, 34:].max() < -0.8
    assert found.shape == (3, 20, 16) and found[:, :8].min() > 0.8 and found[:, -8:].max() < -0.8
    gray = Image.fromarray(np.full((16, 16), 200, np.uint8))
    gray.save(tmp_path / "gray.webp", lossless=True)
    found = captioned.resize_and_crop(captioned.Sample("x", image=tmp_path / "gray.webp"), (16, 16), False)
    assert (found == torch.tensor(200 / 127.5 - 1)).all()


# ---- MLPerf's


def stable(folder: Path, shape: tuple[int, ...] = (1, 8, 8, 8)) -> tuple[Path, np.ndarray]:
    """Tars of moments and captions."""
    values = np.random.default_rng(5).normal(size=(IMAGES, *shape)).astype(np.float32)
    values[3, 0, 4:], values[4, 0, 4:] = -40, 30                                # beyond what the autoencoder lets through
    for part in range(2):
        members: dict[str, bytes | str] = {}
        for n in range(part * 5, part * 5 + 5):
            members |= {f"{n:09}.txt": caption(n), f"{n:09}.npy": npy(values[n])}
        tar(folder / f"{part:05}.tar", members)
    return folder, values[:, 0]


def test_stable_diffusion_of_mlperf_is_copied(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, values = stable(tmp_path / "in")
    assert convert(folder, tmp_path / "out", "--tokens", pipeline / "text_encoder_2", *SMALL) == 0
    for split, these in numbers().items():
        rows = columns(tmp_path / "out" / split)
        assert (rows["moments"][:, :4] == values[these, :4].astype(np.float16)).all() and sorted(rows) == ["moments", "tokens"]
        assert (rows["moments"][:, 4:] == values[these, 4:].clip(-30, 20).astype(np.float16)).all()
        for row, number in enumerate(these):
            assert rows["tokens"][row] == pytest.approx(by_hand(pipeline, number)["tokens"].numpy(), rel=2e-3, abs=2e-3)
    index = read_json(tmp_path / "out" / "train" / "index.json")
    about = {"scale": 0.18215, "shift": 0, "latents": 4, "size": [8, 8], "image": [64, 64], "vae": "mlperf"}
    assert {name: index[name] for name in about} == about
    assert index["pooled"] is None and index["encoders"] == [encoders.identity(pipeline / "text_encoder_2")]
    assert "expected about 1; is the scale" in capsys.readouterr().out           # which these are not


def bits(values: np.ndarray) -> bytes:
    return npy((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


def flux(number: int, level: int | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a row in the published format, and its values: small integers, equal in bfloat16 and float16."""
    draw = np.random.default_rng(number)
    values = {name: draw.integers(-20, 20, shape).astype(np.float32) for name, shape in
              (("mean", (16, 4, 4)), ("logvar", (16, 4, 4)), ("t5_encodings", (5, 6)), ("clip_encodings", (3,)))}  # fmt: skip
    row = {"__key__": f"key{number}", **{name: bits(one) for name, one in values.items()}, "timestep": level}
    return row, {"moments": np.concatenate((values["mean"], values["logvar"])), "tokens": values["t5_encodings"],
                 "pooled": values["clip_encodings"]}  # fmt: skip


SCHEMA = pa.schema([("__key__", pa.string()), *((name, pa.binary()) for name in captioned.COLUMNS), ("timestep", pa.int32())])


def arrow(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a table as datasets.save_to_disk does."""
    folder.mkdir(parents=True)
    names = []
    for part in range(2):
        names.append(f"data-{part:05}-of-00002.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as stream:
            half = list(rows[part * len(rows) // 2 : (part + 1) * len(rows) // 2])
            for begin in range(0, len(half), 2):
                stream.write_table(pa.Table.from_pylist(half[begin : begin + 2], SCHEMA))
    about = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None}
    return write(folder, {"state.json": json.dumps(about), "dataset_info.json": "{}"})


def flux_folders(root: Path) -> Path:
    arrow(root / "cc12m_preprocessed", [flux(n, None)[0] for n in range(9)])
    arrow(root / "coco_preprocessed", [flux(100 + n, n % 8)[0] for n in range(16)])
    empty = {"t5_empty.npy": npy(np.full((1, 5, 6), 0.5, np.float16)), "clip_empty.npy": npy(np.full((1, 3), 2, np.float16))}
    write(root / "empty_encodings", empty)
    return root


def test_flux_of_mlperf_is_copied(tmp_path: Path) -> None:
    assert convert(flux_folders(tmp_path / "in"), tmp_path / "out", "--rows", 4, "--workers", 2) == 0
    for split, first, count in (("train", 0, 9), ("validation", 100, 16)):
        rows = columns(tmp_path / "out" / split)
        for n in range(count):
            for name, values in flux(first + n, None)[1].items():
                values = np.concatenate((values[:16], values[16:].clip(-30, 20))) if name == "moments" else values
                assert (rows[name][n] == values).all()
        assert len(rows["moments"]) == count and ("level" in rows) == (split == "validation")
    assert rows["level"].dtype == np.int64 and rows["level"].tolist() == [n % 8 for n in range(16)]
    index = read_json(tmp_path / "out" / "validation" / "index.json")
    about = {"scale": 0.3611, "shift": 0.1159, "latents": 16, "size": [4, 4], "image": [32, 32], "tokens": [5, 6], "pooled": 3,
             "vae": "mlperf", "encoders": ["mlperf"]}  # fmt: skip
    assert {name: index[name] for name in about} == about
    with np.load(tmp_path / "out" / "nothing.npz") as nothing:
        assert (nothing["tokens"] == np.full((5, 6), 0.5)).all() and (nothing["pooled"] == np.full(3, 2)).all()
    asked = {"moments": ("float16", (32, None, None)), "level": ("int64", ())}
    rows = open_split(tmp_path / "out" / "validation", asked, "", LoaderConfig(), dist.single_process())
    assert rows.read(11)["level"] == 3
    rows.close()


def test_times_are_of_validation_alone_and_a_limit_takes_the_first(tmp_path: Path) -> None:
    folder = arrow(tmp_path / "in", [flux(n, n % 8)[0] for n in range(20)])
    assert convert(folder, tmp_path / "out", "--validation", 0.3, "--limit", 15, "--workers", 1) == 0
    train, held = (columns(tmp_path / "out" / split) for split in ("train", "validation"))
    assert "level" not in train and len(train["moments"]) == 10
    these = np.flatnonzero(latents.validation_mask(15, 0.3, 0))
    assert held["level"].tolist() == (these % 8).tolist() and len(these) == 5
    assert all((row == flux(int(n), None)[1]["tokens"]).all() for row, n in zip(held["tokens"], these))


# ---- what cannot be used


def nothing(folder: Path) -> None:
    pass


def cut_tar(folder: Path, at: Callable[[int], int]) -> None:
    path = folder / "00001.tar"
    path.write_bytes(path.read_bytes()[: at(path.stat().st_size)])


def overwrite(name: str, data: bytes | str) -> Callable[[Path], None]:
    return lambda folder: write(folder, {name: data}) and None


def member(name: str, data: bytes) -> Callable[[Path], None]:
    """Return a change of a member of the second tar."""

    def change(folder: Path) -> None:
        with tarfile.open(folder / "00001.tar") as file:
            every = {one.name: file.extractfile(one).read() for one in file}    # type: ignore[union-attr]
        tar(folder / "00001.tar", {**every, name: data})

    return change


WRONG: dict[str, tuple[str, Callable[[Path], object], list[str], str]] = {
    "broken image": ("images", overwrite("06.png", encoded(picture(6))[:300]), [], "06.png: cannot be read as an image"),
    "broken npy": ("images", overwrite("05.npy", npy(picture(5))[:300]), [], "05.npy: not a complete .npy"),
    "16 bits": ("images", lambda folder: Image.fromarray(np.zeros((20, 20), np.uint16)).save(folder / "06.png"), [],
                "06.png: pixels of more than 8 bits"),
    "floats": ("images", overwrite("05.npy", npy(np.zeros((20, 20, 3)))), [], "05.npy: holds latents, where others are images"),
    "small image": ("images", overwrite("06.png", encoded(picture(6, 20, 12))), [], "06.png: 20 x 12, smaller than --size 16 x 16"),
    "no caption": ("images", lambda folder: (folder / "07.txt").unlink(), [], "07.npy: no caption, as 1 of 10 samples"),
    "size": ("images", nothing, ["--size", "18"], "--size 18 x 18: expected multiples of 4"),
    "places": ("images", nothing, ["--tokens", "clip", "--length", "10"], "has 9 positions"),
    "no autoencoder": ("images", nothing, ["--vae", ""], "an image, which needs an autoencoder"),
    "no pooled": ("images", nothing, ["--pooled", "t5"], "t5 has no pooled output"),
    "nothing for training": ("images", nothing, ["--validation", "10"], "none is left for train"),
    "empty": ("images", lambda folder: [path.unlink() for path in folder.iterdir()], [], "holds no image"),
    "tar within a member": ("tars", lambda folder: cut_tar(folder, lambda size: 1800), [], "00001.tar: not a complete tar"),
    "tar between members": ("tars", lambda folder: cut_tar(folder, lambda size: 512 + 512), [], "00001.tar: not a complete tar"),
    "NaN": ("tars", member("000000006.npy", npy(np.full((1, 8, 8, 8), np.nan, np.float32))), [],
            "000000006: moments holds nan, expected numbers within 65504"),
    "too large": ("tars", member("000000006.npy", npy(np.full((1, 8, 8, 8), 7e4, np.float32))), [], "moments holds 70000"),
    "another shape": ("tars", member("000000006.npy", npy(np.zeros((1, 8, 8, 9), np.float32))), [],
                      "000000006: moments is [8, 8, 9], expected [8, 8, 8]"),
    "no moments": ("tars", member("000000006.npy", npy(np.zeros((8, 8), np.float32))), [], "000000006.npy: holds float32 [8, 8]"),
    "an image": ("tars", member("000000006.npy", npy(picture(1))), [], "000000006: no latents, where others have one"),
    "another autoencoder": ("tars", nothing, ["--vae", "vae"], "has latents of 2 channels, those of"),
    "arrow cut off": ("flux", lambda folder: (lambda path: path.write_bytes(path.read_bytes()[:-3000]))(
        folder / "cc12m_preprocessed" / "data-00001-of-00002.arrow"), [], "data-00001-of-00002.arrow: not a complete table"),
    "arrow lost": ("flux", lambda folder: (folder / "cc12m_preprocessed" / "data-00001-of-00002.arrow").unlink(), [],
                   "data-00001-of-00002.arrow: not a complete table"),
    "empty caption": ("flux", overwrite("empty_encodings/clip_empty.npy", npy(np.zeros((1, 4)))), [],
                      "clip_empty.npy: [1, 4], expected [1, 3]"),
    "no time": ("flux", lambda folder: arrow(folder / "val", [flux(n, None if n == 2 else n)[0] for n in range(4)]), [],
                "key2: level None, where others have one"),
    "two validations": ("flux", nothing, ["--validation", "3"], "has a folder for validation"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_refused_and_named(
    case: str, source: Path, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form, change, words, error = WRONG[case]
    folder = tmp_path / "in"
    if form == "images":
        shutil.copytree(source, folder)
    elif form == "tars":
        stable(folder)
    else:
        flux_folders(folder)
    if case == "no time":
        shutil.rmtree(folder / "coco_preprocessed")
    change(folder)
    names = {"clip": "text_encoder", "t5": "text_encoder_2", "vae": "vae"}
    words = [str(pipeline / names[word]) if word in names else word for word in words]
    given = {"images": ["--vae", pipeline / "vae", "--tokens", pipeline / "text_encoder_2"], "tars": [], "flux": []}[form]
    if "--vae" in words and not words[-1]:
        words, given = [], []
    usual = SMALL if form != "flux" else ["--workers", 1]
    assert convert(folder, tmp_path / "out", *usual, *given, *words) == 2
    error_text = capsys.readouterr().err
    assert error_text.startswith("error: ") and error in error_text and error_text.count("\n") == 1, error_text
    assert not (tmp_path / "out" / "statistics.json").exists() or case == "empty caption"


@pytest.mark.parametrize(
    ("words", "error"),
    [(["--size", "20"], "size [16, 16] (now [20, 20])"), (["vae"], "vae vae "), (["text_encoder"], "encoders [")],
)
def test_a_folder_that_was_begun_otherwise_is_refused(
    made: Path, source: Path, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    if not words[0].startswith("-"):                                            # other weights
        other = shutil.copytree(pipeline, tmp_path / "pipeline")
        path = next((other / words[0]).glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1] + b"\x3d")
        pipeline, words = other, []
    before = content(made)
    assert convert(source, made, "--model", pipeline, *SMALL, *words) == 2
    output = capsys.readouterr().err
    assert f"{made}: was made with {error}" in output and "choose a new folder" in output and content(made) == before


def test_other_images_and_an_out_within_them_are_refused(
    made: Path, source: Path, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(plain(tmp_path / "in", IMAGES + 1), made, "--model", pipeline, *SMALL) == 2
    assert "sources {'all': '10 files" in capsys.readouterr().err
    assert convert(source, source / "out", "--model", pipeline, *SMALL) == 2
    assert "OUT lies within SOURCE" in capsys.readouterr().err and not (source / "out").exists()


def test_without_transformers_the_error_names_the_extra(
    source: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_the_check_draws_and_finds_damage(made: Path, tmp_path: Path, capsys: Any) -> None:
    out = shutil.copytree(made, tmp_path / "out")
    words = ["check", str(out)]
    assert latents.main(words) == 0
    assert (out / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert "10 samples against index.json: equal" in capsys.readouterr().out

    def spoil(file: h5py.File) -> None:
        file["moments"][0, L] = 21

    damage(out, spoil)
    np.savez(out / "nothing.npz", tokens=np.zeros((2, 2), np.float16))
    assert latents.main(words) == 1
    text = capsys.readouterr().out
    assert "variances outside -30 to 20" in text and "nothing.npz: tokens is [2, 2]" in text and text.count("wrong: ") == 2
    damage(out, lambda file: file["tokens"].__setitem__((1, 0, 0), np.inf))
    assert latents.main(words) == 1 and "'tokens' row 1 of 3 holds NaN or infinity" in capsys.readouterr().out
