"""Every reader of files that come from outside, and a real input for each."""

import gzip
import json
import shutil
import struct
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from apps.cosmoflow.settings import Config
from data_prep import documents, nifti, tfrecord, trajectories
from hpcai import config, dist, log, train
from hpcai.cli.report import run as report
from hpcai.data import layout
from hpcai.data.hdf5 import Rows
from hpcai.data.index import write_index
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig
from hpcai.models.llm import Tokenizer
from hpcai.models.openfold import OpenFold, OpenFoldConfig
from hpcai.models.openfold.alignments import read_alignment, read_hhr
from hpcai.models.openfold.structures import read_mmcif, write_structure
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress
from tests import proteins
from tests.data_prep.test_trajectories import load_relaxation, write_aselmdb
from tests.fuzz.attack import Reader
from tests.reference_data import DATA
from tests.unit.models.openfold.test_alignments import A3M, HHR, STO

ROOT = DATA.parents[1]


def bytes_of(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def all_of(items: Iterable[Any]) -> list[Any]:
    return list(items)


# ---- proteins


def structure(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        chain = proteins.pdb_chain("3u8v_A")
        some = slice(10, 30)
        write_structure(folder / name, chain.aatype[some], chain.positions[some], chain.mask[some], chain.bfactors[some])
        return folder / name

    return make


# ---- weights


@cache
def small() -> CosmoFlow:
    torch.manual_seed(0)
    return CosmoFlow(CosmoFlowConfig(size=32, filters=1, blocks=5, dropout=0.0))


def own_weights(folder: Path) -> Path:
    small().save(folder / "model.safetensors")
    return folder / "model.safetensors"


def torch_weights(folder: Path) -> Path:
    torch.save(small().state_dict(), folder / "model.pt")
    return folder / "model.pt"


def keras_weights(folder: Path) -> Path:
    names = [*(f"conv3d{f'_{i}' if i else ''}" for i in range(5)), "dense", "dense_1", "dense_2"]
    state = list(small().state_dict().values())
    with h5py.File(folder / "model.h5", "w") as file:
        for i, name in enumerate(names):
            kernel, bias = state[2 * i].numpy(), state[2 * i + 1].numpy()
            file[f"model_weights/{name}/{name}/kernel:0"] = kernel.transpose(2, 3, 4, 1, 0) if kernel.ndim == 5 else kernel.T
            file[f"model_weights/{name}/{name}/bias:0"] = bias
    return folder / "model.h5"


def alphafold_weights(folder: Path) -> Path:
    model = OpenFold(OpenFoldConfig.preset("tiny"))
    model.save(folder / "params.npz", form="alphafold")
    return folder / "params.npz"


# ---- data


FIELDS = {"counts": ("int16", (4, 4, 4, 4)), "target": ("float32", (4,))}


OF_TABLE = {**FIELDS, "cut": ("int16", (12, 40)), "flat": ("int16", ("count", 600)), "count": ("int16", ())}


def rows_file(folder: Path) -> Path:
    with h5py.File(folder / "rows.h5", "w") as file:
        for name, (dtype, shape) in FIELDS.items():
            file.create_dataset(name, data=np.arange(3 * np.prod(shape)).reshape(3, *shape).astype(dtype))
    return folder / "rows.h5"


def rows_index(folder: Path) -> Path:
    made = rows_file(folder)
    entry = {"name": made.name, "rows": 3, "bytes": made.stat().st_size}
    fields = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in FIELDS.items()}
    (folder / "index.json").write_text(json.dumps({"fields": fields, "files": [entry]}, indent=1))
    return folder / "index.json"


def rows_table(folder: Path) -> Path:
    """Of datasets in one piece and in chunks, small and large ones, in so many files that its arrays are longer than its header."""
    made = rows_file(folder)
    with h5py.File(made, "a") as file:
        file.create_dataset("cut", data=np.arange(3 * 12 * 40, dtype=np.int16).reshape(3, 12, 40), chunks=(2, 5, 40))
        file["flat"], file["count"] = np.arange(5 * 600, dtype=np.int16).reshape(5, 600), np.array([2, 0, 3], np.int16)
    files = [made, *(folder / f"rows {number}.h5" for number in range(40))]
    for path in files[1:]:
        shutil.copy(made, path)
    write_index(folder, {"files": [{"name": path.name, "rows": 3, "bytes": path.stat().st_size} for path in files]})
    return next(folder.glob("index-*"))


def read_table(path: Path) -> None:
    read_rows(path, OF_TABLE)


def read_table_resealed(path: Path) -> None:
    """The index says what the damaged table is, as who forges one would let it."""
    import hashlib

    data = path.read_bytes()
    told = json.loads((path.parent / "index.json").read_text())
    told["table"] = {"name": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path.parent / "index.json").write_text(json.dumps(told))
    read_table(path)


def read_rows(path: Path, fields: Any = FIELDS) -> None:
    rows = Rows(path.parent, fields)
    try:
        for row in range(min(len(rows), 5)):
            rows.read(row)
    finally:
        rows.close()


def npy(folder: Path) -> Path:
    np.save(folder / "field.npy", np.arange(60, dtype=np.float32).reshape(3, 4, 5))
    return folder / "field.npy"


def reseal_tfrecord(data: bytes) -> bytes:
    """Right checksums for the length that stands there and for the payload that follows."""
    size = struct.unpack("<Q", data[:8])[0]
    payload = data[12 : 12 + min(size, len(data) - 16)]
    crc = tfrecord._masked_crc
    return data[:8] + struct.pack("<I", crc(data[:8])) + payload + struct.pack("<I", crc(payload))


def gunzipped(seal: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: gzip.compress(seal(gzip.decompress(data)))


def volume(folder: Path) -> Path:
    values = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
    nifti.write(folder, values, values % 3, (3.0, 0.8, 0.9))
    return folder / nifti.IMAGE


def frames_from_points(ending: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        import ase.io

        few, path = [*load_relaxation()][:2], folder / f"frames{ending}"
        if ending == ".aselmdb":
            write_aselmdb(path, few)
        else:
            ase.io.write(path, few)
        return path

    return make


def read_frames(path: Path) -> None:
    for item in trajectories.frame_readers(path, path.name):
        item()


# ---- text


TEXT = "".join(json.dumps({"text": f"naïve {n}", "id": n}) + "\n" for n in range(20)).encode()


def table(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "rows.parquet"
    pq.write_table(pa.table({"text": [f"naïve {n}" for n in range(60)]}), path, row_group_size=20)
    return path


def read_documents(path: Path) -> None:
    units, _, _ = documents.file_size(path)
    for _, found in documents.read_documents(documents.Piece(path, path.name, 0, units), ["text"]):
        if not isinstance(found, dict | str | documents.Unusable):
            all_of(found)


def zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def tokenizer(file: str) -> Callable[[Path], Path]:
    return lambda folder: shutil.copytree(DATA / "llm" / "tokenizer", folder, dirs_exist_ok=True) / file


def use_tokenizer(path: Path) -> None:
    one = Tokenizer.load(path.with_name("tokenizer.json"))
    one.decode(one.encode_document("naïve <|eos|> 123"))
    one.chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "4"}])
    one.byte_lengths.sum()


# ---- runs


def lines(folder: Path) -> Path:
    events = [{"kind": "train", "time": 1.0, "step": n, "loss": 1.0 / n, "values": [n, "NaN"]} for n in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder / "metrics.jsonl"


def take_up(path: Path) -> None:
    log.open_resumed(path, 4, log._is_later).close()


def run_of(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        lines(folder)
        (folder / "settings.yaml").write_text(config.dump(config.load(Config)))
        return folder / file

    return make


def step() -> train.Step:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return train.Step(model, lambda m, x: {"loss": m(x).square().mean()}, train.StepConfig(optimizer="sgd"), dist.single_process())


def checkpoint_of(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        one = step()
        one(torch.ones(4, 3))
        where = Checkpoints(folder / "checkpoints", train.CheckpointConfig(), dist.single_process())
        made = where.save(one, Progress(step=1)).path
        return next(made.glob(file))

    return make


def resume(path: Path) -> None:
    Checkpoints(path.parent.parent, train.CheckpointConfig(), dist.single_process()).resume(step())


def resume_resealed(path: Path) -> None:
    """The manifest says what the damaged file is, as who forges a checkpoint would let it."""
    import hashlib

    manifest = path.parent / "manifest.json"
    told = json.loads(manifest.read_text())
    data = path.read_bytes()
    told["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(told))
    resume(path)


def resume_header(path: Path) -> None:
    """The index says what the damaged header is, too."""
    import hashlib

    index = path.with_name("index.json")
    told, data = json.loads(index.read_text()), path.read_bytes()
    file = told["files"][path.name]
    file |= {"bytes": len(data), "sha256": hashlib.sha256(data[: file["header"]]).hexdigest()}
    index.write_text(json.dumps(told))
    resume_resealed(index)


READERS = [
    Reader("A3M", bytes_of("hits.a3m", A3M), read_alignment),
    Reader("A3M, gzip", bytes_of("hits.a3m.gz", gzip.compress(A3M)), read_alignment, gunzipped(bytes)),
    Reader("Stockholm", bytes_of("hits.sto", STO), read_alignment),
    Reader("HHsearch", bytes_of("hits.hhr", HHR), read_hhr),
    Reader("mmCIF", structure("chain.cif"), read_mmcif),
    Reader("safetensors", own_weights, CosmoFlow.load),
    Reader("PyTorch", torch_weights, CosmoFlow.load),
    Reader("Keras HDF5", keras_weights, CosmoFlow.load),
    Reader("AlphaFold npz", alphafold_weights, OpenFold.load),
    Reader("HDF5 rows", rows_file, read_rows),
    Reader("index.json", rows_index, read_rows, names=("rows.h5",)),
    Reader("index.json with a table", lambda folder: rows_table(folder).with_name("index.json"), read_table,
           names=("rows", "index-")),
    Reader("table of index.json", rows_table, read_table),
    Reader("table of index.json, resealed", rows_table, read_table_resealed, names=("rows",)),
    Reader("npy", npy, layout.npy_layout),
    Reader("TFRecord", bytes_of("u.tfrecord", next((DATA / "cosmoflow/tfrecord").glob("*.tfrecord")).read_bytes()),
           lambda path: all_of(tfrecord.read_samples(path, 4)), reseal_tfrecord),
    Reader("TFRecord, gzip", bytes_of("u.tfrecord", next((DATA / "cosmoflow/tfrecord_gzip").glob("*.tfrecord")).read_bytes()),
           lambda path: all_of(tfrecord.read_samples(path, 4)), gunzipped(reseal_tfrecord)),
    Reader("NIfTI", volume, lambda path: nifti.read(path.parent), gunzipped(bytes)),
    Reader("extxyz", frames_from_points(".extxyz"), read_frames),
    Reader("ASE traj", frames_from_points(".traj"), read_frames),
    Reader("aselmdb", frames_from_points(".aselmdb"), read_frames),
    Reader("text", bytes_of("notes.txt", TEXT), read_documents),
    Reader("JSON lines", bytes_of("lines.jsonl", TEXT), read_documents),
    Reader("JSON lines, gzip", bytes_of("lines.jsonl.gz", gzip.compress(TEXT)), read_documents, gunzipped(bytes)),
    Reader("JSON lines, zst", lambda folder: bytes_of("lines.jsonl.zst", zst(TEXT))(folder), read_documents),
    Reader("FASTA", bytes_of("some.fasta", A3M), read_documents),
    Reader("Parquet", table, read_documents),
    Reader("tokenizer.json", tokenizer("tokenizer.json"), use_tokenizer),
    Reader("tokenizer_config.json", tokenizer("tokenizer_config.json"), use_tokenizer, names=("tokenizer.json",)),
    Reader("settings", bytes_of("small.yaml", (ROOT / "apps/cosmoflow/configs/small.yaml").read_bytes()),
           lambda path: config.load(Config, path)),
    Reader("metrics.jsonl", lines, log.read_metrics),
    Reader("metrics.jsonl, resumed", lines, take_up),
    Reader("report", run_of("metrics.jsonl"), lambda path: report.read_run(path.parent)),
    Reader("report, settings", run_of("settings.yaml"), lambda path: report.read_run(path.parent)),
    *(Reader(f"checkpoint, {name}", checkpoint_of(name), resume, names=("step-",))
      for name in ("manifest.json", "run.json", "index.json", "*.safetensors")),
    *(Reader(f"checkpoint, {name}, resealed", checkpoint_of(name), resume_resealed, names=("step-",))
      for name in ("run.json", "index.json")),
    Reader("checkpoint, *.safetensors, resealed", checkpoint_of("*.safetensors"), resume_header, names=("step-",)),
]  # fmt: skip
