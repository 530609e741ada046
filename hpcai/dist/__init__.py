"""Processes and the named axes they form."""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        ".environment": ["Place", "place"],
        ".launch": ["start", "alone", "communicator"],
        ".mesh": ["Mesh", "Axis"],
        ".collect": ["sum_in_place", "agree", "rows_to_first"],
    },
)
