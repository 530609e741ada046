"""Reward functions, with the signature of trl. ``columns`` are the further columns of a file of prompts, with a value for each
completion. Both rewards are 1 or 0."""

import re
from functools import lru_cache
from typing import Any

from hpcai.errors import DataError

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
HYDROPHOBIC = "ACFILMV"  # residues with a positive hydropathy (Kyte and Doolittle 1982)
CHARGES = {"D": -1, "E": -1, "K": 1, "R": 1}
LENGTHS = range(8, 17)  # residues of a sequence
_ELEMENT = r"(?:[A-Zx]|\[[A-Z]+\]|\{[A-Z]+\})(?:\(\d+\))?"
_COMPOSITION = re.compile(r"hydrophobic>=(\d+)%|charge(>=|<=)([+-]?\d+)")


def arithmetic(prompts: list[str], completions: list[str], answer: list[Any], **columns: Any) -> list[float]:
    """Return 1 for a completion whose last word is the answer. Words before it, such as the sums of columns, do not count."""
    return [float(text.split()[-1:] == [str(right)]) for text, right in zip(completions, answer, strict=True)]


def motifs(prompts: list[str], completions: list[str], motif: list[str], composition: list[str], **columns: Any) -> list[float]:
    """Return 1 for a sequence of 8 to 16 residues that holds the motif and has the composition.

    ``motif``: A pattern of PROSITE, as ``N-x-[ST]`` or ``C-x(2)-C-{P}``. ``composition``: ``hydrophobic>=40%`` of the residues, or
    net ``charge>=+2`` or ``charge<=-2``. Raises DataError for others."""
    return [float(len(text) in LENGTHS and set(text) <= set(AMINO_ACIDS) and has_composition(text, wanted)
                  and motif_pattern(pattern).search(text) is not None)
            for text, pattern, wanted in zip(completions, motif, composition, strict=True)]  # fmt: skip


@lru_cache(1 << 16)
def motif_pattern(motif: str) -> re.Pattern[str]:
    """Return the regular expression of a motif."""
    if re.fullmatch(f"{_ELEMENT}(?:-{_ELEMENT})*", motif) is None:
        raise DataError(f"motif {motif!r}: expected residues, x, [ST] or {{P}}, any with a number as in x(2), and - between them")
    table: dict[str, Any] = {"-": "", "x": ".", "{": "[^", "}": "]", "(": "{", ")": "}"}
    return re.compile(motif.translate(str.maketrans(table)))


def has_composition(sequence: str, composition: str) -> bool:
    if (match := _COMPOSITION.fullmatch(composition)) is None:
        raise DataError(f"composition {composition!r}: expected hydrophobic>=40%, charge>=+2 or charge<=-2, with any number")
    if match[1]:
        return 100 * sum(residue in HYDROPHOBIC for residue in sequence) >= int(match[1]) * len(sequence)
    charge = sum(CHARGES.get(residue, 0) for residue in sequence)
    return charge >= int(match[3]) if match[2] == ">=" else charge <= int(match[3])
