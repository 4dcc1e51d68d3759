"""`transformers.Trainer(ib.wrap(model))` on two ranks of gloo, where infinitybatch's own Trainer is
refused."""

import os
import tempfile

import infinitybatch as ib
import pytest
from ranks_support import on_two_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    os.environ.get("INFINITYBATCH_LONG_TESTS", "0") == "0", reason="imports transformers twice"
)


def trains(rank):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    from hf_support import (
        NATIVE,
        farthest,
        language_model,
        texts,
        token_loss,
        trainer,
        transformers,
    )
    from infinitybatch.transformers import Trainer

    folder, data = tempfile.mkdtemp(), texts(48)
    models = [language_model() for _ in range(2)]
    wrapped = ib.wrap(models[1], micro_batch_size=5)
    options = {"compute_loss_func": token_loss, "arguments": {"ddp_backend": "gloo"}}
    for model in (models[0], wrapped):
        trainer(transformers.Trainer, model, folder, data, NATIVE, **options).train()
    with pytest.raises(ib.Unsupported, match=r"transformers.Trainer\(ib.wrap\(model\)"):
        trainer(Trainer, language_model(), folder, data, NATIVE, **options)
    return farthest(models[1], models[0]), wrapped.last_report.micro_batch_sizes


def test_on_two_ranks():
    for distance, sizes in on_two_ranks(trains):
        assert distance < 1e-12 and sizes == [5, 5, 2]
