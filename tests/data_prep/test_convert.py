"""Conversion of public TFRecords and HDF5 universes to our files. Damaged records are reported with their byte offset."""

import gzip
import shutil
import struct

import h5py
import numpy as np
import pytest

from data_prep import cosmoflow, tfrecord
from tests.data_prep.prep_contract import check_error, columns, runner
from tests.reference_data import DATA, load_arrays

pytest.importorskip("google_crc32c")
pytest.importorskip("google.protobuf")


run = runner(cosmoflow)


def convert(source, out, *options, workers="1"):
    return run("convert", source, out, *options, workers=workers)


def read_split(out, split="train"):
    datasets = columns(out / split)
    assert datasets["counts"].dtype == np.int16 and datasets["target"].dtype == np.float32
    return datasets["counts"], datasets["target"]


# ---- records for cases that the golden files lack


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(x, y):
    """Return an encoded tf.train.Example, without use of the reader's own message definition."""
    features = {"x": field(1, field(1, x)), "y": field(2, field(1, struct.pack(f"<{len(y)}f", *y)))}
    return field(1, b"".join(field(1, field(1, name.encode()) + field(2, value)) for name, value in features.items()))


def frame(payload):
    header = struct.pack("<Q", len(payload))
    return header + struct.pack("<I", tfrecord._masked_crc(header)) + payload + struct.pack("<I", tfrecord._masked_crc(payload))


def sample(seed, edge=4):
    random = np.random.default_rng(seed)
    return random.integers(0, 900, (edge, edge, edge, 4)).astype("<i2"), random.uniform(-1, 1, 4).astype(np.float32)


def record(seed, edge=4):
    counts, target = sample(seed, edge)
    return frame(example(counts.tobytes(), target.tolist()))


@pytest.fixture
def public(tmp_path):
    """Write 5 files of one record for training, and 2 for validation."""
    for split, count in (("train", 5), ("validation", 2)):
        (tmp_path / "public" / split).mkdir(parents=True)
        for i in range(count):
            (tmp_path / "public" / split / f"u_{i:03d}.tfrecord").write_bytes(record(i + 10 * (split == "validation")))
    return tmp_path / "public"


# ---- conversion


@pytest.mark.parametrize("folder", ["tfrecord", "tfrecord_gzip"])
def test_golden_records_are_the_blocks_of_their_universe(folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in (DATA / "cosmoflow" / folder).glob("*.tfrecord"):
        shutil.copy(file, source)
    assert convert(source, tmp_path / "out", "--split", "validation", "--rows-per-file", "3") == 0
    counts, target = read_split(tmp_path / "out", "validation")
    expected = load_arrays("cosmoflow/tfrecord/expected")
    assert counts.shape == (8, 4, 4, 4, 4) and len(list((tmp_path / "out" / "validation").glob("*.h5"))) == 3
    for i, cube in enumerate(counts):
        x, y, z = 4 * (i // 4), 4 * (i // 2 % 2), 4 * (i % 2)
        assert (cube == expected["full"][x : x + 4, y : y + 4, z : z + 4]).all()
    assert (target == expected["unitPar"]).all()
    assert run("check", tmp_path / "out") == 0


def test_every_record_in_order_with_its_source(public, tmp_path):
    assert convert(public, tmp_path / "out", "--rows-per-file", "2") == 0
    for split, first, count in (("train", 0, 5), ("validation", 10, 2)):
        counts, target = read_split(tmp_path / "out", split)
        assert len(counts) == count
        for i in range(count):
            assert (counts[i] == sample(first + i)[0]).all() and (target[i] == sample(first + i)[1]).all()
    with h5py.File(tmp_path / "out" / "train" / "samples_000001.h5") as file:
        assert file["source"][...].tolist() == [b"train/u_002.tfrecord", b"train/u_003.tfrecord"]
        assert list(file.attrs["parameters"]) == ["Omega_m", "sigma_8", "n_s", "H_0"]


@pytest.mark.parametrize(
    "content",
    [
        lambda: record(0) + record(1) + record(2), lambda: gzip.compress(record(0) + record(1) + record(2)),
        lambda: b"".join(gzip.compress(record(i)) for i in range(3)),
    ],
    ids=["plain", "gzip file", "gzip member each"],
)
def test_many_records_in_one_file_with_any_compression(content, tmp_path):
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.gz").write_bytes(content())       # the suffix is ignored
    (tmp_path / "flat" / "b.tfrecord").write_bytes(record(3))
    assert convert(tmp_path / "flat", tmp_path / "out", "--split", "train") == 0
    counts, target = read_split(tmp_path / "out")
    assert [(counts[i] == sample(i)[0]).all() and (target[i] == sample(i)[1]).all() for i in range(4)] == [True] * 4


def test_a_plain_record_that_begins_like_gzip_is_plain(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(frame(bytes(0x088B1F)))                # its length begins with the three bytes of gzip
    assert [len(payload) for _, payload in tfrecord.read_payloads(file)] == [0x088B1F]


def test_limit_takes_the_first_files(public, tmp_path):
    assert convert(public, tmp_path / "out", "--limit", "2", "--split", "train") == 0
    assert (read_split(tmp_path / "out")[0] == np.stack([sample(0)[0], sample(1)[0]])).all()
    assert not (tmp_path / "out" / "validation").exists()


def write_universe(path, full, unit=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["full"], file["unitPar"] = full, sample(5, edge=8)[1] if unit is None else unit
        if isinstance(file.get("full"), h5py.Dataset):
            file["full"].attrs["_FillValue"] = 999


@pytest.mark.parametrize("dtype", ["i2", ">i2", "u4", "f8"])
def test_a_universe_of_any_number_type_is_cut_with_the_first_axis_slowest(dtype, tmp_path):
    counts, target = sample(5, edge=8)
    write_universe(tmp_path / "train" / "univ_ics_a1.hdf5", counts.astype(dtype))
    assert convert(tmp_path, tmp_path / "out", "--cut-size", "4") == 0
    cubes, targets = read_split(tmp_path / "out")
    assert (cubes[1] == counts[:4, :4, 4:]).all() and (cubes[6] == counts[4:, 4:, :4]).all() and len(cubes) == 8
    assert (targets == target).all()


def test_bad_sources_are_left_out_counted_and_tried_again_if_none_is_left(public, tmp_path, capsys):
    out, bad = tmp_path / "out", [public / "train" / f"u_{i:03d}.tfrecord" for i in (1, 4)]
    for path in bad:
        path.write_bytes(path.read_bytes()[:-1])
    assert convert(public, out, "--rows-per-file", "4") == 2
    check_error(capsys, "u_001.tfrecord: truncated in the record at byte 0", "leave such items out with --skip-bad")
    assert convert(public, out, "--rows-per-file", "4", "--skip-bad") == 0       # the second file of train has no other source
    counts, _ = read_split(out)
    assert (counts == np.stack([sample(i)[0] for i in (0, 2, 3)])).all() and len(list((out / "train").glob("*.h5"))) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"refused: 2 of 7 items: 2 such as {bad[0]}: truncated in")
    assert convert(public, out, "--rows-per-file", "4", "--skip-bad") == 0 and run("check", out) == 0
    for path in (public / "validation").glob("*"):
        path.write_bytes(b"no record")
    options = "--split", "validation", "--skip-bad"
    assert convert(public, tmp_path / "none", *options) == 2
    check_error(capsys, "none/validation: no item can be used: 2 such as", "u_000.tfrecord: begins with bytes 6e 6f")
    for i, path in enumerate((public / "validation").glob("*")):
        path.write_bytes(record(i))
    assert convert(public, tmp_path / "none", *options) == 0 and len(read_split(tmp_path / "none", "validation")[0]) == 2


# ---- refusals


def write(file, data):
    file.write_bytes(data)
    return file


def flip(data, offset):
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


FIRST = len(record(0))


@pytest.mark.parametrize(
    "data, messages",
    [
        (lambda: record(0) + record(1)[:-40], ["truncated", f"byte {FIRST}: "]),
        (lambda: record(0) + record(1)[:7], ["truncated", f"byte {FIRST}: 7 bytes of a header of 12"]),
        (lambda: flip(record(0), 100), ["checksum of the payload", "byte 0"]),
        (lambda: record(0) + flip(record(1), 3), ["checksum of the length", f"byte {FIRST}"]),
        (lambda: gzip.compress(record(0))[:-60], ["damaged gzip", "byte 0 of the decompressed file"]),
        (lambda: gzip.compress(record(0) + record(1)[:-9]), ["truncated", f"byte {FIRST} of the decompressed file"]),
        (lambda: b"not a record at all", ["begins with bytes 6e 6f"]), (lambda: b"", ["is empty"]),
        (lambda: frame(b"\x08\x96\x01 no example"), ["not a tf.train.Example"]),
        (lambda: frame(example(bytes(100), [0, 0, 0, 0])), ["100 bytes are no cube of 4 int16 channels", "--channels"]),
        (lambda: frame(example(bytes(512), [0, 0, 0, 1.6])), ["target", "[-1.5, 1.5]"]),
        (lambda: frame(example(bytes(512), [0, 0, 0, float("nan")])), ["target", "finite"]),
        (lambda: frame(example(bytes(512), [0, 0, 0])), ["3 target values", "expected 4"]),
        (lambda: frame(example(b"\xff" * 512, [0, 0, 0, 0])), ["count of -1"]),
        (lambda: record(0) + record(1, edge=2), ["(2, 2, 2, 4)", "expected (4, 4, 4, 4)", f"byte {FIRST}"]),
    ],
)
def test_a_damaged_file_is_reported_with_its_byte(data, messages, tmp_path, capsys):
    (tmp_path / "flat").mkdir()
    write(tmp_path / "flat" / "bad.tfrecord", data())
    assert convert(tmp_path / "flat", tmp_path / "out", "--split", "train") == 2
    check_error(capsys, "bad.tfrecord", *messages)
    assert not list((tmp_path / "out").rglob("*.h5")) and not list((tmp_path / "out").rglob("*.partial"))


@pytest.mark.parametrize(
    "full, unit, message",
    [
        (np.zeros((8, 8, 8, 4), np.int16), None, "8 cells per side are no multiple of --cut-size 3"),
        (np.zeros((9, 9, 8, 4), np.int16), None, "'full' is int16 (9, 9, 8, 4), expected numbers (N, N, N, 4)"),
        (np.full((9, 9, 9, 4), 0.5), None, "'full' holds 0.5 in cell [0, 0, 0, 0], expected whole numbers from 0 to 32,767"),
        (np.full((9, 9, 9, 4), 65535, "u2"), None, "'full' holds 65535"), (np.full((9, 9, 9, 4), -1), None, "'full' holds -1"),
        (np.full((9, 9, 9, 4), 999), None, "'full' holds 999 in cell [0, 0, 0, 0], expected whole numbers from 0 to 32,767, and"),
        (np.zeros((9, 9, 9, 4), int), np.full(4, 2.0), "[-1.5, 1.5]"), (np.zeros((9, 9, 9, 4)), np.zeros(3), "3 target values"),
        (h5py.SoftLink("/counts/z0"), None, "'full' is a link to /counts/z0, where nothing is"),
    ],
)
def test_a_faulty_universe_is_reported_in_one_line(full, unit, message, tmp_path, capsys):
    write_universe(tmp_path / "train" / "u.hdf5", full, unit)
    assert convert(tmp_path, tmp_path / "out", "--cut-size", "3") == 2
    check_error(capsys, "u.hdf5", message)


def test_an_error_in_a_worker_is_the_same_line(public, tmp_path, capsys):
    write(public / "train" / "u_003.tfrecord", record(3)[:-1])
    assert convert(public, tmp_path / "out", "--rows-per-file", "1", workers="2") == 2
    check_error(capsys, "u_003.tfrecord: truncated in the record at byte 0")


@pytest.mark.parametrize(
    "prepare, options, message",
    [
        (lambda source: None, [], "no such folder"), (lambda source: source.mkdir(), [], "--split"),
        (lambda source: source.mkdir(), ["--split", "train"], "no files"),
    ],
)
def test_a_wrong_source_is_reported_in_one_line(prepare, options, message, tmp_path, capsys):
    prepare(tmp_path / "source")
    assert convert(tmp_path / "source", tmp_path / "out", *options) == 2
    check_error(capsys, message)
