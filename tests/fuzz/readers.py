"""All readers of external files, with a valid input for each."""

import copy
import gzip
import hashlib
import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import torch

from apps.cosmoflow.settings import Config
from data_prep import captioned, documents, nifti, store, tfrecord, trajectories
from hpcai import config, dist, log, train
from hpcai.cli import report
from hpcai.data import layout
from hpcai.data.hdf5 import Rows
from hpcai.data.index import write_index
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig
from hpcai.models.diffusion import read_folder
from hpcai.models.llm import LLM, Tokenizer, lora
from hpcai.models.llm.text import stop_tokens
from hpcai.models.openfold import OpenFold, OpenFoldConfig
from hpcai.models.openfold.alignments import read_alignments, read_hhr
from hpcai.models.openfold.structures import read_structure, write_structure
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress
from tests import proteins
from tests.data_prep.test_trajectories import load_relaxation, write_aselmdb
from tests.fuzz.attack import Reader
from tests.reference_data import DATA, ROOT
from tests.unit.cli.test_report import events
from tests.unit.models.openfold.test_alignments import A3M, HHR, STO


def write_bytes(name: str, data: bytes, folder: Path) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def digest(data: bytes) -> dict[str, Any]:
    """Return the entry of a file's content in an index or manifest."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# ---- proteins


def write_chain(folder: Path) -> Path:
    chain, part, path = proteins.pdb_chain("3u8v_A"), slice(10, 30), folder / "chain.cif"
    write_structure(path, chain.aatype[part], chain.positions[part], chain.mask[part], chain.bfactors[part])
    return path


# ---- weights


@cache
def small_model() -> CosmoFlow:
    torch.manual_seed(0)
    return CosmoFlow(CosmoFlowConfig(size=32, filters=1, blocks=5, dropout=0.0))


def write_safetensors(folder: Path) -> Path:
    small_model().save(folder / "model.safetensors")
    return folder / "model.safetensors"


def write_torch(folder: Path) -> Path:
    torch.save(small_model().state_dict(), folder / "model.pt")
    return folder / "model.pt"


def write_keras(folder: Path) -> Path:
    names = [*(f"conv3d{f'_{i}' if i else ''}" for i in range(5)), "dense", "dense_1", "dense_2"]
    state = list(small_model().state_dict().values())
    with h5py.File(folder / "model.h5", "w") as file:
        for i, name in enumerate(names):
            kernel, bias = state[2 * i].numpy(), state[2 * i + 1].numpy()
            file[f"model_weights/{name}/{name}/kernel:0"] = kernel.transpose(2, 3, 4, 1, 0) if kernel.ndim == 5 else kernel.T
            file[f"model_weights/{name}/{name}/bias:0"] = bias
    return folder / "model.h5"


def write_alphafold(folder: Path) -> Path:
    OpenFold(OpenFoldConfig.preset("tiny")).save(folder / "params.npz", form="alphafold")
    return folder / "params.npz"


# ---- data


FIELDS = {"counts": ("int16", (4, 4, 4, 4)), "target": ("float32", (4,))}


TABLE_FIELDS = {**FIELDS, "cut": ("int16", (12, 40)), "flat": ("int16", ("count", 600)), "count": ("int16", ())}


def write_hdf5(folder: Path) -> Path:
    with h5py.File(folder / "rows.h5", "w") as file:
        for name, (dtype, shape) in FIELDS.items():
            file.create_dataset(name, data=np.arange(3 * np.prod(shape)).reshape(3, *shape).astype(dtype))
    return folder / "rows.h5"


def write_hdf5_index(folder: Path) -> Path:
    rows_path = write_hdf5(folder)
    entry = {"name": rows_path.name, "rows": 3, "bytes": rows_path.stat().st_size}
    fields = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in FIELDS.items()}
    (folder / "index.json").write_text(json.dumps({"fields": fields, "files": [entry]}, indent=1))
    return folder / "index.json"


def write_hdf5_table(folder: Path) -> Path:
    """Write contiguous and chunked datasets, in so many files that the table's arrays are longer than its header."""
    rows_path = write_hdf5(folder)
    with h5py.File(rows_path, "a") as file:
        file.create_dataset("cut", data=np.arange(3 * 12 * 40, dtype=np.int16).reshape(3, 12, 40), chunks=(2, 5, 40))
        file["flat"], file["count"] = np.arange(5 * 600, dtype=np.int16).reshape(5, 600), np.array([2, 0, 3], np.int16)
    files = [rows_path, *(folder / f"rows {number}.h5" for number in range(40))]
    for path in files[1:]:
        shutil.copy(rows_path, path)
    write_index(folder, {"files": [{"name": path.name, "rows": 3, "bytes": path.stat().st_size} for path in files]})
    return next(folder.glob("index-*"))


def read_table_resealed(path: Path) -> None:
    """Recompute the checksum in the index, as in a forged table."""
    index = json.loads((path.parent / "index.json").read_text())
    index["table"] = {"name": path.name, **digest(path.read_bytes())}
    (path.parent / "index.json").write_text(json.dumps(index))
    read_table(path)


def read_rows(path: Path, fields: Any = FIELDS) -> None:
    rows = Rows(path.parent, fields)
    try:
        for row in range(min(len(rows), 5)):
            rows.read(row)
    finally:
        rows.close()


read_table = partial(read_rows, fields=TABLE_FIELDS)


def write_npy(folder: Path) -> Path:
    np.save(folder / "field.npy", np.arange(60, dtype=np.float32).reshape(3, 4, 5))
    return folder / "field.npy"


def reseal_tfrecord(data: bytes) -> bytes:
    """Recompute the checksums of the stored length and of the payload that follows."""
    size = struct.unpack("<Q", data[:8])[0]
    payload = data[12 : 12 + min(size, len(data) - 16)]
    crc = tfrecord._masked_crc
    return data[:8] + struct.pack("<I", crc(data[:8])) + payload + struct.pack("<I", crc(payload))


def reseal_gzip(seal: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: gzip.compress(seal(gzip.decompress(data)))


def write_volume(folder: Path) -> Path:
    values = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
    nifti.write(folder, values, values % 3, (3.0, 0.8, 0.9))
    return folder / nifti.IMAGE


def write_frames(ending: str, folder: Path) -> Path:
    import ase.io

    frames, path = [*load_relaxation()][:2], folder / f"frames{ending}"
    if ending == ".aselmdb":
        write_aselmdb(path, frames)
    else:
        ase.io.write(path, frames)
    return path


def read_frames(path: Path) -> None:
    for item in trajectories.frame_readers(path, path.name):
        item()


# ---- text


TEXT = "".join(json.dumps({"text": f"naïve {n}", "id": n}) + "\n" for n in range(20)).encode()


def write_parquet(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "rows.parquet"
    pq.write_table(pa.table({"text": [f"naïve {n}" for n in range(60)]}), path, row_group_size=20)
    return path


def read_documents(path: Path) -> None:
    units, _, _ = documents.file_size(path)
    for _, document in documents.read_documents(documents.Piece(path, path.name, 0, units), ["text"]):
        if not isinstance(document, dict | str | documents.UnusableError):
            list(document)


def compress_zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def use_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.load(path.with_name("tokenizer.json"))
    tokenizer.decode(tokenizer.encode_document("naïve <|eos|> 123"))
    tokenizer.chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "4"}])
    tokenizer.byte_lengths.sum()


# ---- folders of models


def copy_file(path: str) -> Callable[[Path], Path]:
    """Return a function that copies the folder of a file of tests/data."""
    return lambda folder: shutil.copytree((DATA / path).parent, folder, dirs_exist_ok=True) / Path(path).name


def write_template(folder: Path) -> Path:
    config = json.loads(copy_file("llm/tokenizer/tokenizer_config.json")(folder).read_text())
    loop = "{% for n in range(3) %}{{ n * 2 }}{{ 'ab' * 3 }}{{ '%5d' % n }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(config.pop("chat_template") + loop)
    return folder / "chat_template.jinja"


@cache
def base_model() -> LLM:
    return LLM.load(DATA / "llm" / "llama2_tiny" / "hf")


def read_stop_tokens(path: Path) -> None:
    model = copy.copy(base_model())
    vars(model)["_tokenizer"], model.folder = Tokenizer.byte_level(), path.parent
    stop_tokens(model)


# ---- images with captions


def write_image(folder: Path, form: str = "png") -> Path:
    from PIL import Image

    path = folder / f"a.{form}"
    Image.fromarray(np.arange(12 * 9 * 3, dtype=np.uint8).reshape(12, 9, 3)).save(path)
    path.with_suffix(".txt").write_text("a cat")
    return path


def reseal_png(data: bytes) -> bytes:
    """Recompute the checksum of each chunk."""
    sealed, at = data[:8], 8
    while at + 12 <= len(data):
        end = at + 8 + min(int.from_bytes(data[at : at + 4], "big"), len(data) - at - 12)
        sealed += data[at:end] + struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return sealed


def write_tar(folder: Path) -> Path:
    (images := folder / "images").mkdir()
    write_image(images)
    return Path(shutil.make_archive(str(folder / "some"), "tar", images))


def write_table(folder: Path) -> Path:
    import pyarrow as pa

    np.save(array := io.BytesIO(), np.ones((4, 2, 2), np.uint16))
    row = {"__key__": "a", "mean": array.getvalue(), "logvar": array.getvalue(), "timestep": 3}
    with pa.OSFile(str(folder / "some.arrow"), "wb") as file:
        table = pa.Table.from_pylist([row, row])
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "some.arrow"}], "_split": None}))
    return folder / "some.arrow"


def read_captioned(path: Path) -> None:
    for shard in captioned.find_shards(path.parent):
        for sample in captioned.read_samples(shard, captioned.list_samples(shard)["entries"], store.Skipped(False)):
            if sample.image is not None:
                captioned.resize_and_crop(sample, (8, 8), enlarge=True)


# ---- runs


def write_metrics(folder: Path) -> Path:
    energy = {"kind": "energy", "time": 2e9, "joules": 5.0, "samples": 16, "seconds": 3.0, "gpu_limits_w": [300, 300]}
    startup = {"kind": "startup", "time": 2e9, "parts": {"imports": 1.5}}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (*events(80), energy, startup)))
    return folder / "metrics.jsonl"


def resume_metrics(path: Path) -> None:
    log.open_resumed(path, 4, log._is_later).close()


def write_run(file: str, folder: Path) -> Path:
    write_metrics(folder)
    (folder / "settings.yaml").write_text(config.dump(config.load(Config)))
    return folder / file


def render_report(path: Path) -> None:
    """Write the pages of one run and of two, without drawing their plots."""
    with mock.patch("hpcai.cli.report.document.render_plot", lambda left_out, plot: None):
        report.draw_run(path.parent)
        report.compare_runs([path.parent] * 2)


def new_step() -> train.Step:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return train.Step(model, lambda m, x: {"loss": m(x).square().mean()}, train.StepConfig(optimizer="sgd"), dist.single_process())


def write_checkpoint(file: str, folder: Path) -> Path:
    step = new_step()
    step(torch.ones(4, 3))
    checkpoints = Checkpoints(folder / "checkpoints", train.CheckpointConfig(), dist.single_process())
    saved = checkpoints.save(step, Progress(step=1)).path
    return next(saved.glob(file))


def resume(path: Path) -> None:
    Checkpoints(path.parent.parent, train.CheckpointConfig(), dist.single_process()).resume(new_step())


def resume_resealed(path: Path) -> None:
    """Recompute the checksum in the manifest, as in a forged checkpoint."""
    manifest = path.parent / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"][path.name] = digest(path.read_bytes())
    manifest.write_text(json.dumps(content))
    resume(path)


def resume_header(path: Path) -> None:
    """Recompute the checksum of the header in the index, too."""
    index = path.with_name("index.json")
    content, data = json.loads(index.read_text()), path.read_bytes()
    file = content["files"][path.name]
    file |= digest(data[: file["header"]]) | {"bytes": len(data)}
    index.write_text(json.dumps(content))
    resume_resealed(index)


# Errors of two files, which name their folder or one of them.
FOLDER = "does not exist", "the settings make it", "the weights have", "is it an adapter of"

Listed = partial(Reader, listed=True)
READERS = [
    Reader("A3M", partial(write_bytes, "hits.a3m", A3M), read_alignments),
    Reader("A3M, gzip", partial(write_bytes, "hits.a3m.gz", gzip.compress(A3M)), read_alignments, reseal_gzip(bytes)),
    Reader("Stockholm", partial(write_bytes, "hits.sto", STO), read_alignments),
    Reader("HHsearch", partial(write_bytes, "hits.hhr", HHR), read_hhr),
    Reader("mmCIF", write_chain, read_structure),
    Reader("safetensors", write_safetensors, CosmoFlow.load),
    Reader("PyTorch", write_torch, CosmoFlow.load),
    Reader("Keras HDF5", write_keras, CosmoFlow.load),
    Reader("AlphaFold npz", write_alphafold, OpenFold.load),
    Reader("HDF5 rows", write_hdf5, read_rows),
    Reader("index.json", write_hdf5_index, read_rows, names=("rows.h5",)),
    Reader("index.json with a table", lambda folder: write_hdf5_table(folder).with_name("index.json"), read_table,
           names=("rows", "index-")),
    Reader("table of index.json", write_hdf5_table, read_table),
    Listed("table of index.json, resealed", write_hdf5_table, read_table_resealed, names=("rows",)),
    Reader("npy", write_npy, layout.npy_layout),
    Listed("TFRecord", partial(write_bytes, "u.tfrecord", next((DATA / "cosmoflow/tfrecord").glob("*.tfrecord")).read_bytes()),
           lambda path: list(tfrecord.read_samples(path, 4)), reseal_tfrecord),
    Listed("TFRecord, gzip",
           partial(write_bytes, "u.tfrecord", next((DATA / "cosmoflow/tfrecord_gzip").glob("*.tfrecord")).read_bytes()),
           lambda path: list(tfrecord.read_samples(path, 4)), reseal_gzip(reseal_tfrecord)),
    Reader("NIfTI", write_volume, lambda path: nifti.read(path.parent), reseal_gzip(bytes)),
    Listed("extxyz", partial(write_frames, ".extxyz"), read_frames),
    Listed("ASE traj", partial(write_frames, ".traj"), read_frames),
    Listed("aselmdb", partial(write_frames, ".aselmdb"), read_frames),
    Listed("text", partial(write_bytes, "notes.txt", TEXT), read_documents),
    Listed("JSON lines", partial(write_bytes, "lines.jsonl", TEXT), read_documents),
    Listed("JSON lines, gzip", partial(write_bytes, "lines.jsonl.gz", gzip.compress(TEXT)), read_documents, reseal_gzip(bytes)),
    Listed("JSON lines, zst", lambda folder: write_bytes("lines.jsonl.zst", compress_zst(TEXT), folder), read_documents),
    Listed("FASTA", partial(write_bytes, "some.fasta", A3M), read_documents),
    Listed("Parquet", write_parquet, read_documents),
    Reader("tokenizer.json", copy_file("llm/tokenizer/tokenizer.json"), use_tokenizer),
    Reader("tokenizer_config.json", copy_file("llm/tokenizer/tokenizer_config.json"), use_tokenizer, names=("tokenizer.json",)),
    Reader("chat_template.jinja", write_template, use_tokenizer, names=("tokenizer.json",)),
    *(Reader(f"llm/{file}", copy_file(f"llm/{file}"), lambda path: LLM.load(path.parent), names=FOLDER)
      for file in ("broken/good/config.json", "broken/good/model.safetensors.index.json", "gpt2_hub_tiny/hf/config.json",
                   "broken/good/model-00001-of-00002.safetensors")),
    Reader("generation_config.json", partial(write_bytes, "generation_config.json", b'{"eos_token_id": [2, 5], "k": 9}'),
           read_stop_tokens),
    *(Reader(file, copy_file(f"llm/llama2_tiny/lora_qv/{file}"), names=FOLDER,
             read=lambda path: lora.load_adapter(copy.deepcopy(base_model()), path.parent))
      for file in ("adapter_config.json", "adapter_model.safetensors")),
    *(Reader(f"diffusion/{file}", copy_file(f"diffusion/{file}"), lambda path: read_folder(path.parent), names=FOLDER)
      for file in ("broken/ok/config.json", "unet2d_tiny/model_a/config.json", "dit_tiny/model_a/config.json",
                   "flux_tiny/model_dev/config.json", "flux_tiny/model_dev/diffusion_pytorch_model.safetensors",
                   "sd3_tiny/model_35/config.json")),
    Reader("image, png", write_image, read_captioned, reseal_png),
    *(Reader(f"image, {form}", partial(write_image, form=form), read_captioned) for form in ("jpg", "webp")),
    Reader("tar of images", write_tar, read_captioned),
    Reader("Arrow", write_table, read_captioned),
    Reader("state.json", lambda folder: write_table(folder).with_name("state.json"), read_captioned, names=("complete table",)),
    Reader("settings", partial(write_bytes, "small.yaml", (ROOT / "apps/cosmoflow/configs/small.yaml").read_bytes()),
           lambda path: config.load(Config, path)),
    Reader("metrics.jsonl", write_metrics, log.read_metrics),
    Listed("metrics.jsonl, resumed", write_metrics, resume_metrics),
    Reader("report", partial(write_run, "metrics.jsonl"), render_report),
    Reader("report, settings", partial(write_run, "settings.yaml"), render_report),
    *(Reader(f"checkpoint, {name}", partial(write_checkpoint, name), resume, names=("step-",))
      for name in ("manifest.json", "run.json", "index.json", "*.safetensors")),
    *(Listed(f"checkpoint, {name}, resealed", partial(write_checkpoint, name), resume_resealed, names=("step-",))
      for name in ("run.json", "index.json")),
    Listed("checkpoint, *.safetensors, resealed", partial(write_checkpoint, "*.safetensors"), resume_header, names=("step-",)),
]  # fmt: skip
