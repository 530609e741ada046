"""The picture of a language model's run: what is drawn, told and listed is what text.npz holds."""

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


def rows(count: int = 5, length: int = 40) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    nats = torch.rand(count, length, generator=draw)
    return {"tokens": torch.randint(32, 127, (count, length + 1), generator=draw), "nats": nats, "counted": nats > 0}


def test_the_page_shows_bits_and_texts_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "text.npz", rows(), CODES, TEXTS)
    scores = {"loss": 2.0, "bits_per_byte": 1.6}, {"loss": 1.9, "bits_per_byte": 1.5}
    run = report_runs.write_evaluated_run(tmp_path, "llm", "lower", *scores)
    found = report_runs.page_text(run)
    for words in ("Held-out text", "200 tokens of validation rows", "prompt generated", "return &lt;b&gt;x", "bits_per_byte 1.5"):
        assert words in found, words
    assert report_runs.is_drawn(picture, run.predictions, monkeypatch)


def test_what_is_drawn_is_what_the_file_holds(tmp_path: Path) -> None:
    given = rows()
    write_texts(tmp_path / "text.npz", given, CODES, TEXTS)
    found = picture.read(tmp_path / "text.npz")
    left, right = picture.draw(found, LIGHT).axes
    assert [bar.get_width() for bar in left.patches] == list(CODES.values())
    assert [label.get_text() for label in left.get_yticklabels()] == list(CODES)
    places, losses = right.get_lines()[0].get_data()
    change = f"{losses[-1] - losses[0]:+.2f} from first to last positions"
    assert subtitle(right) == f"mean {float(given['nats'].mean()):.3f} nats; {change}"
    assert losses[0] == pytest.approx(float(given["nats"][:, 0].mean())) and places[0] == 1
    table = picture.table(found)
    assert table is not None and table.rows == TEXTS


@pytest.mark.parametrize(("changes", "says"), [
    ({"positions": [math.nan] * 4}, "not finite"), ({"counts": [0] * 4}, "no token counts"), ({"bits": [1.0]}, "expected"),
    ({"texts": [["a", "b"]]}, "expected"), ({"counts": [1.5] * 4}, "counts is float64"), ({"positions": None}, "has no array"),
])  # fmt: skip
def test_a_file_that_is_none_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    whole = {"positions": [1.0] * 4, "counts": [2] * 4, "names": [*CODES], "bits": [*CODES.values()], "texts": TEXTS}
    path = report_runs.write_arrays(tmp_path / "text.npz", whole | changes)
    with pytest.raises(DataError, match=says):
        picture.read(path)


# ---- what is measured


def test_codes_are_of_the_very_text() -> None:
    given, tokenizer = rows(), Tokenizer.byte_level()
    found = measure_codes(given, tokenizer)
    text = bytes(given["tokens"][:, 1:].flatten().tolist())
    assert found["gzip -9"] == 8 * len(gzip.compress(text, 9)) / len(text)
    assert found["this model"] == pytest.approx(float(given["nats"].double().sum()) / math.log(2) / len(text))
    given["counted"][2, 3] = False
    assert measure_codes(given, tokenizer) == {}, "only some count"
