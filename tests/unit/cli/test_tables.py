from hpcai.cli import tables


def test_numbers_are_right_aligned_and_text_is_left_aligned() -> None:
    rows = [("adam", 7, "1.5", "fast"), (), ("lamb", 1000, "0.25", "of any width")]
    assert list(tables.lines(rows, ("name", "n", "seconds", "is"), left=("name", "is"))) == [
        "name     n  seconds  is",
        "----  ----  -------  ------------",
        "adam     7      1.5  fast",
        "",
        "lamb  1000     0.25  of any width",
    ]
    assert list(tables.lines([("torch", "2.13"), ("h5py", "3.11")])) == ["torch  2.13", "h5py   3.11"]
    assert list(tables.lines([])) == []
