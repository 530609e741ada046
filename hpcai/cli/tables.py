"""Text tables, the same in terminals and files: each row is one line of any width."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest


def lines(rows: Iterable[Sequence[object]], heads: Sequence[str] = (), left: Collection[str] = ("",)) -> Iterator[str]:
    """Yield the lines of a table. With ``heads`` there is a header, and columns not named in ``left`` are right-aligned."""
    cells = [[str(cell) for cell in row] for row in ([heads, *rows] if heads else rows)]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    sides = [str.rjust if head not in left else str.ljust for head in heads] or [str.ljust] * len(widths)
    if heads:
        cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        yield "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)).rstrip()
