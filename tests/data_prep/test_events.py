"""Tables of events: Criteo's files of each form, the multi-hot generator of MLPerf, simulated reads and clicks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import events
from hpcai.data.events import EventTable
from hpcai.errors import DataError
from tests.reference_data import DATA

GOLDEN = np.load(DATA / "dlrm/multi_hot.npz", allow_pickle=False)
ROWS, HOTNESS = GOLDEN["rows"].tolist(), GOLDEN["hotness"].tolist()
SIZES = ["--rows", *map(str, ROWS), "--hotness", *map(str, HOTNESS), "--workers", "1", "--memory", "0.00002"]
DAYS = 40, 30, 25


def write_days(folder: Path, multi_hot: bool) -> dict[str, np.ndarray]:
    """Write three days, and return their rows by column. The first number of an event is its own."""
    random, columns = np.random.default_rng(0), {}
    folder.mkdir()
    count = sum(DAYS)
    one_hot = np.stack([random.integers(0, 3 * n, count) for n in ROWS], 1).astype(np.int32)
    columns = {"labels": random.integers(0, 2, (count, 1)).astype(np.int32), "sparse": one_hot,
               "dense": np.concatenate((np.arange(count)[:, None], random.random((count, 12))), 1).astype(np.float32)}  # fmt: skip
    bags = [np.column_stack((ids % n, GOLDEN[f"table{t}"][ids % n][:, 1:])) for t, (ids, n) in enumerate(zip(one_hot.T, ROWS))]
    beyond = [bag + n * random.integers(0, 2, bag.shape) for bag, n in zip(bags, ROWS)]  # capped by modulo
    first = 0
    for day, size in enumerate(DAYS):
        here = slice(first, first := first + size)
        for kind in ("labels", "dense", *(() if multi_hot else ("sparse",))):
            np.save(folder / f"day_{day}_{kind}.npy", columns[kind][here])
        if multi_hot:
            arrays: Any = {str(t): bag[here].astype(np.int32) for t, bag in enumerate(beyond)}
            np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **arrays)
    return {**columns, "ids": np.concatenate(bags, 1), "beyond": np.concatenate(beyond, 1).astype(np.int32)}


def check_table(out: Path, expected: dict[str, Any], label: Any) -> None:
    table, order = EventTable(out), []
    assert (list(table.rows), list(table.hotness), table.dense) == (ROWS, HOTNESS, 13)
    assert [split["rows"] for split in table.splits.values()] == [sum(DAYS[:2]), 13, 12]
    for split in table.splits:
        dense, ids, labels = table.check(np.array(table.mapped(split)), table.path(split))
        numbers = dense[:, 0].astype(int)
        assert (ids == expected["ids"][numbers]).all() and (dense == expected["dense"][numbers]).all()
        assert (labels == label[numbers]).all() and labels.sum() == table.splits[split]["positives"]
        order += numbers.tolist()
    assert sorted(order) == [*range(sum(DAYS))] and order[sum(DAYS[:2]) :] == [*range(sum(DAYS[:2]), sum(DAYS))]
    assert 0.3 < (np.diff(order[: sum(DAYS[:2])]) > 0).mean() < 0.7, "training rows are shuffled, within parts too"


@pytest.mark.parametrize("multi_hot", [False, True])
def test_days_of_criteo_become_rows(tmp_path: Path, multi_hot: bool) -> None:
    expected = write_days(tmp_path / "days", multi_hot)
    assert events.main(["convert", str(tmp_path / "days"), str(tmp_path / "out"), *SIZES]) == 0
    check_table(tmp_path / "out", expected, expected["labels"][:, 0])
    assert not (tmp_path / "out/.work").exists() and events.main(["check", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_rows_of_hugectr_are_read_with_labels_of_both_types(tmp_path: Path, kind: Any) -> None:
    expected = write_days(tmp_path / "days", False)
    words = [expected["labels"].astype(kind).view(np.int32), expected["dense"].view(np.int32), expected["beyond"]]
    rows, first = np.concatenate(words, 1), 0
    (tmp_path / "raw").mkdir()
    for name, size in (("train", sum(DAYS[:2])), ("val", 13), ("test", 12)):
        rows[first : first + size].tofile(tmp_path / f"raw/{name}_data.bin")
        first += size
    assert events.main(["convert", str(tmp_path / "raw"), str(tmp_path / "out"), *SIZES]) == 0
    check_table(tmp_path / "out", expected, expected["labels"][:, 0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("day_1_sparse.npy", b"damaged", "cannot be read"), ("day_1_sparse_multi_hot.npz", b"PK", "is no npz file")],
)
def test_damaged_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    write_days(tmp_path / "days", name.endswith("npz"))
    (tmp_path / "days" / name).write_bytes(content)
    assert events.main(["convert", str(tmp_path / "days"), str(tmp_path / "out"), *SIZES]) == 2
    error = capsys.readouterr().err
    assert name in error and message in error
    assert not (tmp_path / "out/table.json").exists()


def test_simulated_events_do_not_depend_on_workers_and_have_a_truth(tmp_path: Path) -> None:
    sizes = ["--events", "400", "--genome", "1000", "--organisms", "3", "--length", "60", "--rows", "12", "--no-check"]
    for kind in ("reads", "clicks"):
        contents = []
        for workers in (1, 2):
            out = tmp_path / f"{kind}{workers}"
            assert events.main(["simulate", str(out), "--kind", kind, *sizes, "--workers", str(workers)]) == 0
            contents.append((out / "train.bin").read_bytes() + (out / "validation.bin").read_bytes())
        table = EventTable(out)
        _, ids, label = table.check(np.array(table.mapped("validation")), out)
        truth = table.truth()
        assert contents[0] == contents[1] and len(next(iter(truth.values()))) == len(label) == 100
        if kind == "reads":
            positive = np.array([set(label[truth["truth_organism"] == own]) for own in np.unique(truth["truth_organism"])])
            assert all(len(labels) == 1 for labels in positive), "all reads of a strain have one label"
            assert (truth["truth_distance"][truth["truth_organism"][label == 1]] == 0).all() and (ids >= 0).mean() > 0.5
        else:
            assert abs(label.mean() - 0.03) < 0.06 and np.corrcoef(truth["truth_logit"], label)[0, 1] > 0


def test_both_strands_of_a_read_have_the_same_ids() -> None:
    reads = events.Reads(events.Recipe(genome=1000, organisms=2, length=60))
    bases = np.random.default_rng(0).integers(0, 4, (5, 50), np.int8)
    for forward, backward in zip(reads._codes(bases), reads._codes(3 - bases[:, ::-1])):
        assert (np.sort(forward, 1) == np.sort(backward, 1)).all() and (forward >= 0).any()
    with pytest.raises(DataError, match="has no table.json"):
        EventTable(Path("/nonexistent"))
