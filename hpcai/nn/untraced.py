"""What a compiler leaves out of its graphs: ``torch.compiler.disable``, which alone costs every process a second at its start.

It imports the compiler where a function is defined, also in a job that compiles nothing. By the name below, as in torch's own
optimizers, that waits until the function is first called.
"""

from typing import Any

import torch

untraced: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
