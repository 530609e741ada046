"""Reward functions of answers, with the signature of trl: ``f(prompts, completions, **columns)`` returns a reward of each.

``columns`` are the further columns of a file of prompts, with a value for each completion. Both rewards are 1 or 0: a share of a
right answer has none.
"""

import re
from functools import lru_cache
from typing import Any

from hpcai.errors import DataError

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
HYDROPHOBIC = "ACFILMV"
"""residues with a positive hydropathy (Kyte and Doolittle 1982)"""
CHARGES = {"D": -1, "E": -1, "K": 1, "R": 1}
LENGTHS = range(8, 17)
"""numbers of residues of a sequence"""
_ELEMENT = re.compile(r"(?:(x)|([A-Z])|\[([A-Z]+)\]|\{([A-Z]+)\})(?:\((\d+)(?:,(\d+))?\))?")
_COMPOSITION = re.compile(r"(hydrophobic>=(\d+)%)|charge(>=|<=)([+-]?\d+)")


def arithmetic(prompts: list[str], completions: list[str], answer: list[Any], **columns: list[Any]) -> list[float]:
    """Return 1 for a completion whose last word is the answer. Words before it, such as the sums of columns, do not count."""
    return [float(text.split()[-1:] == [str(right)]) for text, right in zip(completions, answer, strict=True)]


def motifs(
    prompts: list[str], completions: list[str], motif: list[str], composition: list[str], **columns: list[Any]
) -> list[float]:
    """Return 1 for a sequence of 8 to 16 residues that holds the motif and has the composition.

    ``motif``: A pattern of PROSITE: residues, x, [ST], {P} and numbers of repeats, as in ``C-x(2,4)-C-[ST]-{P}``. ``composition``:
    ``hydrophobic>=40%`` of the residues, or a net ``charge>=+2`` or ``charge<=-2`` of D, E (-1), K and R (+1). Raises DataError for
    others."""
    return [float(len(text) in LENGTHS and set(text) <= set(AMINO_ACIDS) and has_composition(text, wanted)
                  and motif_pattern(pattern).search(text) is not None)
            for text, pattern, wanted in zip(completions, motif, composition, strict=True)]  # fmt: skip


@lru_cache(1 << 16)
def motif_pattern(motif: str) -> re.Pattern[str]:
    """Return the regular expression of a motif."""
    parts = list[str]()
    for element in motif.split("-"):
        if (match := _ELEMENT.fullmatch(element)) is None:
            raise DataError(f"motif {motif!r}: element {element!r}, expected a residue, x, [ST] or {{P}}, or one with (2) or (2,4)")
        any_residue, residue, some, others, low, high = match.groups()
        position = "." if any_residue else residue or (f"[{some}]" if some else f"[^{others}]")
        parts.append(position + (f"{{{low},{high or low}}}" if low else ""))
    return re.compile("".join(parts))


def has_composition(sequence: str, composition: str) -> bool:
    """Return whether a sequence has a composition."""
    if (match := _COMPOSITION.fullmatch(composition)) is None:
        raise DataError(f"composition {composition!r}: expected hydrophobic>=40%, charge>=+2 or charge<=-2, with any number")
    if match[1]:
        return 100 * sum(residue in HYDROPHOBIC for residue in sequence) >= int(match[2]) * len(sequence)
    charge = sum(CHARGES.get(residue, 0) for residue in sequence)
    return charge >= int(match[4]) if match[3] == ">=" else charge <= int(match[4])
