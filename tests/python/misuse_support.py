"""What tests of misuse share: a step with one thing wrong, and the error that is expected of it."""

import infinitybatch as ib
import pytest
from support import classification, mlp
from torch import nn

X, Y = classification(12)
CRITERION = nn.CrossEntropyLoss()


def step(model=None, inputs=X, targets=Y, loss=None, **options):
    options = options or {"micro_batch_size": 4}
    batch = ib.VirtualBatch(model or mlp(), loss or CRITERION, **options)
    return batch.backward(inputs, targets)


def check(function, kind, message):
    """The call raises that error with that message: typed, and short enough to be read."""
    with pytest.raises(kind, match=f"(?s){message}") as raised:
        function()
    if kind is not TypeError:
        assert isinstance(raised.value, ib.Error)
        assert len(str(raised.value)) < 600
