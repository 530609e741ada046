"""Tables of text, alike in terminals and in files: a row is a line, however wide."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest


def lines(rows: Iterable[Sequence[object]], heads: Sequence[str] = (), left: Collection[str] = ("",)) -> Iterator[str]:
    """Yield the lines of a table. With ``heads``, they and a rule come first, and columns that ``left`` does not name are aligned
    to the right, as numbers are."""
    cells = [[str(cell) for cell in row] for row in ([heads, *rows] if heads else rows)]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    sides = [str.rjust if head not in left else str.ljust for head in heads] or [str.ljust] * len(widths)
    if heads:
        cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        yield "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)).rstrip()
