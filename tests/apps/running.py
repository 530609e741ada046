"""An app run in this process, as its command line would."""

from collections.abc import Callable, Sequence
from typing import Any

from hpcai import config
from hpcai.config import Settings


def exit_code(settings: type[Settings], main: Callable[[Any], None], words: Sequence[str]) -> int:
    """Of ``main`` with the settings that ``words`` give."""
    try:
        config.run(settings, main, list(words))
    except SystemExit as end:
        return int(end.code or 0)
    return 0
