"""What the files of small networks have in common (see `architectures`)."""

from collections.abc import Callable
from typing import Any

from torch import nn

Made = tuple[nn.Module, Any]
Maker = Callable[[], Made]
Makers = dict[str, Maker]
N = 7


def architecture(kind: Makers) -> Callable[[Maker], Maker]:
    """Lists a network under its function's name."""

    def add(make: Maker) -> Maker:
        kind[make.__name__] = make
        return make

    return add
