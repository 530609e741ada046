"""Processes and the named axes they form."""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "Place": ".environment",
        "place": ".environment",
        "start": ".launch",
        "alone": ".launch",
        "communicator": ".launch",
        "Mesh": ".mesh",
        "Axis": ".mesh",
        "sum_in_place": ".collect",
        "agree": ".collect",
        "gather_rows": ".collect",
    },
)
