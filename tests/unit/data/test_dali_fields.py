"""What is done with a field, and where DALI is not installed."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hpcai import dist
from hpcai.data import dali
from hpcai.data.dali import DaliLoader, Field, apply, draw
from hpcai.errors import DataError, MissingExtraError


def test_the_twin_itself_by_hand() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 1000, (5, 6, 7, 2)).astype(np.int16)
    image = rng.integers(0, 256, (8, 9, 3)).astype(np.uint8)
    volume = Field("x", "DHWC", crop=(2, 3, 4), crop_at="random", flip="DW")
    middle = Field("image", "HWC", crop=(4, 4), mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
    starts, flips = set(), set()
    for position in range(200):
        drawn = draw(3, 1, position)
        a, b, c = (int(at) * 4 >> 30 for at in drawn[0])
        d, _, w = drawn[1]
        expected = x[a : a + 2, b : b + 3, c : c + 4][:: -1 if d else 1, :, :: -1 if w else 1]
        assert np.array_equal(apply(volume, x, drawn), expected)
        normal = (image[2:6, 2:6].astype(np.float32) - np.float32([1, 2, 3])) / np.float32([4, 5, 6])
        assert np.array_equal(apply(middle, image, drawn), normal)
        starts.add((a, b, c))
        flips.add((int(d), int(w)))
    assert len(starts) > 55 and {s[0] for s in starts} == {0, 1, 2, 3} and len(flips) == 4, "every place and flip occurs"
    assert len({draw(*where).tobytes() for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}) == 4
    first = apply(Field("x", "CHW", mean=[1.0, 2.0], std=2.0), np.ones((2, 1, 1)), draw(0, 0, 0))
    assert first.tolist() == [[[0]], [[-0.5]]]


@pytest.mark.parametrize(
    "words, text",
    [
        ({"layout": "WHC"}, "layout 'WHC', expected one of"),
        ({"layout": "CHW", "decode": True}, "a decoded image is HWC, but layout is 'CHW'"),
        ({"layout": "HWC", "crop": (3, 4, 5)}, r"crop \(3, 4, 5\), expected a size of at least 1 for each of HW"),
        ({"layout": "HWC", "crop": (3, 0)}, "size of at least 1"),
        ({"layout": "HWC", "crop": (3, 3), "crop_at": "left"}, "crop_at 'left', expected center or random"),
        ({"crop": (3,)}, "for each of the dims of a layout"),
        ({"layout": "HWC", "flip": "C"}, "flip 'C', expected letters among D, H and W of the layout 'HWC'"),
        ({"flip": "H"}, "flip 'H', .* layout ''"),
        ({"layout": "HW", "mean": [1.0, 2.0], "std": 1.0}, "a mean and std per channel, but layout 'HW' has no C"),
        ({"layout": "HWC", "mean": [1.0, 2.0], "std": [1.0, 2.0, 3.0]}, "expected as many finite numbers of each"),
        ({"mean": 0.0, "std": 0.0}, "a std that is not 0"),
        ({"mean": float("nan")}, "finite numbers"),
    ],
)
def test_a_field_that_contradicts_itself_is_refused_by_name(words: dict, text: str) -> None:
    with pytest.raises(DataError, match=f"field 'x': .*{text}"):
        Field("x", **words)


def test_without_dali_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(dali, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'hpcai-suite\[dali\]', or read without it: data.reader=direct"):
        DaliLoader(np.zeros(3), 1, dist.alone(), [Field("x")], name="train")  # type: ignore[arg-type]


def test_importing_the_module_imports_no_dali() -> None:
    script = "import sys, hpcai.data.dali; print([m for m in sys.modules if m.startswith(('nvidia.dali', 'PIL'))])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
