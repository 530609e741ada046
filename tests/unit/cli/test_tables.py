from hpcai.cli import tables


def test_numbers_of_a_table_end_at_one_column_and_its_text_begins_at_one() -> None:
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
