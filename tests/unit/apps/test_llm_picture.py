"""The picture of a run of a language model: plots and tables show the contents of text.npz."""

import gzip
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.llm import picture
from apps.llm.texts import measure_codes, write_texts
from hpcai.cli.report.theme import LIGHT
from hpcai.errors import DataError
from hpcai.models.llm import Tokenizer
from tests import report_runs
from tests.report_runs import subtitle

CODES = {"gzip -9": 2.0, "this model": 1.5}
TEXTS = [["def f(", "x):\n    return <b>x</b>", "y):\n    pass"]]


def make_rows(count: int = 5, length: int = 40) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    nats = torch.rand(count, length, generator=draw)
    return {"tokens": torch.randint(32, 127, (count, length + 1), generator=draw), "nats": nats, "counted": nats > 0}


def test_the_page_shows_bits_and_texts_with_line_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.rand(5, 3, 4)
    write_texts(tmp_path / "text.npz", make_rows() | {"load": load}, CODES, TEXTS)
    assert picture.read(tmp_path / "text.npz").load == pytest.approx(load.sum(0).numpy())
    scores = {"loss": 2.0, "bits_per_byte": 1.6}, {"loss": 1.9, "bits_per_byte": 1.5}
    run = report_runs.write_evaluated_run(tmp_path, "llm", "lower", *scores)
    text = report_runs.page_text(run)
    for entry in ("Held-out text", "200 tokens of validation rows", "prompt generated", "return &lt;b&gt;x", "bits_per_byte 1.5",
                  "A byte of held-out text takes 1.5 bits by this model, 1.3 times fewer than by gzip -9 (2). 1.5 bits for each"):
        assert entry in text, entry
    assert report_runs.is_drawn(picture, run.predictions, monkeypatch)


def test_the_picture_shows_the_contents_of_the_file(tmp_path: Path) -> None:
    rows = make_rows()
    write_texts(tmp_path / "text.npz", rows, CODES, TEXTS)
    contents = picture.read(tmp_path / "text.npz")
    bars, curve = (figure.axes[0] for figure in picture.draw(contents, LIGHT))
    assert [bar.get_width() for bar in bars.patches] == list(CODES.values())
    assert [label.get_text() for label in bars.get_yticklabels()] == list(CODES)
    contents.bits[1] = 2.5
    assert "takes 2.5 bits by this model, no fewer than by gzip -9 (2)." in picture.finding(contents).sentence
    contents.names, contents.bits = [], contents.bits[:0]
    assert "costs 0.47 nats: as uncertain as one of 1.6 equally likely ones." in picture.finding(contents).sentence
    positions, losses = curve.get_lines()[0].get_data()
    change = f"{losses[-1] - losses[0]:+.2f} from first to last positions"
    assert subtitle(curve) == f"mean {float(rows['nats'].mean()):.3f} nats; {change}"
    assert losses[0] == pytest.approx(float(rows["nats"][:, 0].mean())) and positions[0] == 1
    table = picture.table(contents)
    assert table is not None and table.rows == TEXTS
    contents.load = torch.tensor([[1.0, 3.0], [0.0, 4.0]]).numpy()
    assert subtitle(picture.draw(contents, LIGHT)[2].axes[0]) == "busiest 2.00; 1 of 4 below 0.1"
    contents.counts[0] = 0
    assert math.isnan(picture.draw(contents, LIGHT)[1].axes[0].get_lines()[0].get_ydata()[0]), "no token, no loss"


@pytest.mark.parametrize(("changes", "message"), [
    ({"positions": [math.nan] * 4}, "not finite"), ({"counts": [0] * 4}, "no token counts"),
])  # fmt: skip
def test_unusable_files_are_refused_with_a_reason(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arrays = {"positions": [1.0] * 4, "counts": [2] * 4, "names": [*CODES], "bits": [*CODES.values()], "texts": TEXTS}
    path = report_runs.write_arrays(tmp_path / "text.npz", arrays | changes)
    with pytest.raises(DataError, match=message):
        picture.read(path)


# ---- code lengths


def test_code_lengths_are_those_of_the_same_text() -> None:
    rows, tokenizer = make_rows(), Tokenizer.byte_level()
    codes = measure_codes(rows, tokenizer)
    text = bytes(rows["tokens"][:, 1:].flatten().tolist())
    assert codes["gzip -9"] == 8 * len(gzip.compress(text, 9)) / len(text)
    assert codes["this model"] == pytest.approx(float(rows["nats"].double().sum()) / math.log(2) / len(text))
    rows["counted"][2, 3] = False
    assert measure_codes(rows, tokenizer) == {}, "rows with tokens that are not counted have none"
