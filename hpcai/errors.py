"""The exceptions of this package. A message has the location, the value found, the expected values and a remedy."""

import errno
import os

_UNWRITABLE = {
    errno.ENOSPC: "make room, or name a folder on another disk", errno.EDQUOT: "delete files, or ask for a higher quota",
    errno.EROFS: "name a folder that can be written", errno.EACCES: "name a file or folder that this user may use",
}  # fmt: skip


def describe_unwritable(error: OSError, place: object) -> str:
    """Return the line for a file or a folder (its own name, or ``place``) that the system refuses to write. Raises other errors."""
    if error.errno not in _UNWRITABLE:
        raise error
    return f"{error.filename or place}: {os.strerror(error.errno)}; {_UNWRITABLE[error.errno]}"


def escape_controls(text: str, keep: str = "\n\t") -> str:
    """Return ``text``, which may have names from untrusted files, with characters that are not printable escaped, except ``keep``:
    a terminal would obey them."""
    return "".join(char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text)


class HpcaiError(Exception):
    """Base class of all errors that are reported without a traceback; the text is for the user."""

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class ConfigError(HpcaiError, ValueError):
    """One or more invalid settings, one per line."""


class LaunchError(HpcaiError, RuntimeError):
    """Inconsistent ranks of the processes of a job, or no connection between them."""


class MeshError(HpcaiError, ValueError):
    """Axes that do not match the number of processes, or along which a model cannot be sharded."""


class DataError(HpcaiError, ValueError):
    """An unusable file or sample, named in the text."""


class CheckpointError(HpcaiError, RuntimeError):
    """A checkpoint that cannot be written or read, or does not match this run."""


class DivergedError(HpcaiError, ArithmeticError):
    """A loss or a gradient that is not finite, or replicas of weights that differ; the text names the step and the rank.

    ``step``: The step at fault, counted from 1, if there is one.
    """

    def __init__(self, text: str, step: int | None = None) -> None:
        super().__init__(text)
        self.step = step


class MissingExtraError(HpcaiError, ImportError):
    """A missing optional package; the text names its extra."""
