"""Histories of tensors on an accelerator."""

import event_support
import pytest
import simulated_device as sim  # noqa: F401
import torch
from event_support import run
from infinitybatch.histories import History, everything, last

HERE = torch.get_default_device()


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_outputs_wait_where_they_are_told_to(where):
    history = History(outputs=last(2), inputs=everything(), where=where)
    run(history, epochs=2, batches=2)
    kept = history.outputs[-1][-1]
    assert kept.device.type == (HERE.type if where == "device" else "cpu")
    assert kept.shape == (3, event_support.FEATURES) and kept[2].tolist() == [4.0] * 6
    assert history.inputs[0][0].device == kept.device
