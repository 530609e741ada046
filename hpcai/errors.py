"""The one exception family. A message says where, what was found, what was expected and what to do."""


class HpcaiError(Exception):
    """Anything that this package refuses or cannot do; the text is meant for the person at the terminal."""


class ConfigError(HpcaiError, ValueError):
    """One or more wrong settings, one per line."""


class LaunchError(HpcaiError, RuntimeError):
    """The processes of a job do not agree on their places in it, or cannot reach one another."""


class MeshError(HpcaiError, ValueError):
    """The named axes do not fit the processes, or a model cannot be cut along one of them."""


class DataError(HpcaiError, ValueError):
    """A file or a sample that cannot be used; the text names it."""


class CheckpointError(HpcaiError, RuntimeError):
    """A checkpoint that cannot be written, read or matched to this run."""


class DivergedError(HpcaiError, ArithmeticError):
    """The loss or a gradient became NaN or infinite, or copies of the weights differ; the text names the step and the rank.

    ``step`` is its number from 1, where one step is at fault.
    """

    def __init__(self, text: str, step: int | None = None) -> None:
        super().__init__(text)
        self.step = step


class MissingExtraError(HpcaiError, ImportError):
    """An optional package is needed and not installed; the text names the extra that brings it."""
