"""Processes and the named axes they form."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".environment": ["Place", "place"],
        ".launch": ["start", "alone", "communicator"],
        ".mesh": ["Mesh", "Axis"],
        ".collect": ["sum_in_place", "agree", "rows_to_first"],
    },
)
