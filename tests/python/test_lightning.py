"""What `infinitybatch.lightning.InfinityBatch` takes, warns of, refuses and leaves behind."""

import copy
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import infinitybatch as ib
import pytest
import torch
from adapter_support import MICRO_BATCH, loader, loss_of, same_weights
from infinitybatch.lightning import from_text
from lightning_support import Contrastive, infinity, pl, rows_seen, trainer_of
from ranks_support import on_two_ranks
from torch import nn
from wrap_support import close

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore", "default::infinitybatch.AccumulationNotice")


def fit(model: Any, folder: Path, *callbacks: Any, **settings: Any) -> Any:
    trainer = trainer_of(folder, *callbacks, **settings)
    trainer.fit(model, loader(0))
    return trainer


@pytest.mark.parametrize("module", ["encoder", None])
@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_evaluation_goes_by_micro_batches(stage: str, module: Any, tmp_path: Path) -> None:
    model, results = Contrastive(), []
    for callbacks in ((), (infinity(module=module),)):
        rows = rows_seen(model.encoder[0])
        trainer = trainer_of(tmp_path, *callbacks, limit_val_batches=1.0)
        results.append(getattr(trainer, stage)(model, loader(0)))
    assert MICRO_BATCH in rows
    found, wanted = (
        [torch.as_tensor(value) for value in torch.utils._pytree.tree_leaves(result)]
        for result in results[::-1]
    )
    assert wanted
    close(found, wanted)


@pytest.mark.parametrize("module", ["encoder", None])
def test_the_module_is_as_before_afterwards(module: Any, tmp_path: Path) -> None:
    model, seen = Contrastive(), []

    def is_wrapped() -> bool:
        return isinstance(model.encoder, ib.Wrapped) or "forward" in vars(model)

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(is_wrapped())
            if len(seen) == 3:
                raise KeyError("of the user's")

    callback, modules = infinity(module=module), dict(model.named_modules())
    fit(model, tmp_path, callback, Look())
    assert not is_wrapped() and dict(model.named_modules()) == modules
    with pytest.raises(KeyError, match="of the user's"):
        fit(model, tmp_path, callback, Look())
    assert not is_wrapped() and dict(model.named_modules()) == modules
    assert seen == [True] * 3


@pytest.mark.parametrize("module", ["encoder", None])
def test_a_copy_made_meanwhile_computes_with_its_own_weights(module: Any, tmp_path: Path) -> None:
    copies = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            copies.append((copy.deepcopy(module), copy.deepcopy(module.state_dict())))

    model, x = Contrastive(), torch.randn(8, 6).double()
    fit(model, tmp_path, infinity(module=module), Copies())
    for made, weights in copies:
        native = Contrastive()
        native.load_state_dict(weights)
        close(made(x), native(x))


def test_a_submodule_in_two_places(tmp_path: Path) -> None:
    class Twice(Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.ModuleList([self.encoder, nn.Identity()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.both[0](x) + self.encoder(x)

    model, native = Twice(), Twice()
    rows = rows_seen(model.encoder[0])
    fit(model, tmp_path, infinity(module="both.0"))
    fit(native, tmp_path)
    assert MICRO_BATCH in rows
    same_weights(model.state_dict(), native.state_dict())


class OwnBatches(Contrastive):
    """Does not call itself."""

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return loss_of(self.encoder(batch[0]), batch[1])


def test_a_step_that_goes_past_what_is_wrapped(tmp_path: Path) -> None:
    with pytest.warns(
        ib.UnwrappedMethodNotice, match=r"IB105: OwnBatches.*'encoder'.*module="
    ) as told:
        fit(OwnBatches(), tmp_path, infinity())
    assert [w.category for w in told].count(ib.UnwrappedMethodNotice) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", ib.UnwrappedMethodNotice)
        fit(OwnBatches(), tmp_path, infinity(module="encoder"))
        fit(Contrastive(), tmp_path, infinity())


@pytest.mark.parametrize("scheduled", [False, True])
def test_accumulation_is_told_of_once(scheduled: bool, tmp_path: Path) -> None:
    settings = {} if scheduled else {"accumulate_grad_batches": 4}
    more = [pl.callbacks.GradientAccumulationScheduler({0: 4})] if scheduled else []
    with pytest.warns(ib.AccumulationNotice) as told:
        fit(Contrastive(), tmp_path, infinity(), *more, **settings)
    (only,) = [str(w.message) for w in told if w.category is ib.AccumulationNotice]
    assert only.startswith("IB109: accumulate_grad_batches=4 ")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ib.AccumulationNotice)
        fit(Contrastive(), tmp_path, infinity())


def test_without_the_callback_it_trains_something_else(tmp_path: Path) -> None:
    """What the warning is about: accumulation over two batches is not their whole."""
    weights = []
    for batch, settings in ((12, {"accumulate_grad_batches": 2}), (24, {})):
        model = Contrastive()
        data = torch.utils.data.DataLoader(loader(0).dataset, batch_size=batch)
        trainer_of(tmp_path, **settings).fit(model, data)
        weights.append(model.state_dict()["encoder.3.weight"])
    assert float((weights[0] - weights[1]).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: infinity(module="body"), ib.InvalidArgument, "module='body' is no.*'encoder'"),
        (lambda: infinity(module=3), ib.InvalidType, "name of a submodule.*not 3"),
        (lambda: infinity(module=()), ib.InvalidType, "name of a submodule"),
        (lambda: infinity(micro_batch_size=0), ib.InvalidArgument, "micro_batch_size"),
        (lambda: infinity(keep_outputs=True), ib.InvalidArgument, "keep_outputs"),
        (
            lambda: from_text("memory=1GiB"),
            ib.InvalidArgument,
            "INFINITYBATCH_LIGHTNING='memory=1G",
        ),
        (lambda: from_text("memory_budget"), ib.InvalidArgument, "memory_budget=8GiB,module="),
    ],
)
def test_what_is_refused_before_anything_ran(
    make: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = Contrastive()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        fit(model, tmp_path, make())
    same_weights(model.state_dict(), before, 0)


@pytest.mark.parametrize("module", ["encoder", None])
def test_a_compiled_module(module: Any, tmp_path: Path) -> None:
    """Lightning runs its compiled training_step."""
    model, native = Contrastive(), Contrastive()
    rows = rows_seen(model.encoder[0])
    fit(torch.compile(model, backend="eager"), tmp_path, infinity(module=module))
    fit(native, tmp_path)
    assert MICRO_BATCH in rows
    same_weights(model.state_dict(), native.state_dict())


# ---- The entry point -----------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The entry points of pyproject.toml, as an installed package has them."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {
        f"{name}.callbacks_factory" for name in ("lightning.pytorch", "pytorch_lightning")
    }
    # By this name it stands before a package that is installed.
    folder = tmp_path / "installed" / "infinitybatch-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: infinitybatch\nVersion: 1\n")
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups.items()]
    (folder / "entry_points.txt").write_text("".join(lines))
    (folder.parent / "infinitybatch_lightning.py").symlink_to(
        ROOT / "python/infinitybatch_lightning.py"
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder.parent


def test_the_entry_point_wraps_where_it_is_asked_to(
    installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def callbacks() -> list[Any]:
        found = trainer_of(tmp_path).callbacks
        return [c for c in found if isinstance(c, ib.lightning.InfinityBatch)]

    assert callbacks() == []
    monkeypatch.setenv("INFINITYBATCH_LIGHTNING", f"micro_batch_size={MICRO_BATCH},module=encoder")
    assert len(callbacks()) == 1
    model, native = Contrastive(), Contrastive()
    rows = rows_seen(model.encoder[0])
    fit(model, tmp_path)
    assert MICRO_BATCH in rows
    fit(Contrastive(), tmp_path, infinity())  # beside one that is given
    monkeypatch.delenv("INFINITYBATCH_LIGHTNING")
    fit(native, tmp_path)
    same_weights(model.state_dict(), native.state_dict())
    monkeypatch.setenv("INFINITYBATCH_LIGHTNING", "module=encoder=4")
    with pytest.raises(ib.InvalidArgument, match="module='encoder=4' is no submodule"):
        fit(Contrastive(), tmp_path)


def test_values_of_the_variable() -> None:
    callback = from_text(" memory_budget=0.5 , module=a, module=b.0 ")
    assert callback.names == ["a", "b.0"] and callback.options == {"memory_budget": 0.5}
    assert from_text("memory_budget=8GiB").options == {"memory_budget": "8GiB"}
    assert from_text("micro_batch_size=3").options["micro_batch_size"] == 3


def test_a_trainer_that_does_not_ask_does_not_import(installed: Path) -> None:
    code = (
        f"import sys, {pl.__name__} as pl; pl.Trainer(logger=False, enable_checkpointing=False)\n"
        "print('infinitybatch_lightning' in sys.modules, 'infinitybatch' in sys.modules)"
    )
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "True False", done.stderr


# ---- Ranks ---------------------------------------------------------------------------------------


def on_a_rank(rank: int) -> list[list[float]]:
    import tempfile

    os.environ.update(
        TORCHELASTIC_RUN_ID="test", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
        GROUP_RANK="0", LOCAL_WORLD_SIZE="2",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    found = []
    for callbacks in ((), (infinity(module="encoder"),), (infinity(),)):
        model = Contrastive()
        rows = rows_seen(model.encoder[0])
        settings = {"strategy": "ddp", "devices": 2}
        fit(model, Path(tempfile.mkdtemp()), *callbacks, **settings)
        assert (MICRO_BATCH in rows) == bool(callbacks)
        found.append(model.state_dict()["encoder.0.weight"].flatten().tolist())
    return found


def test_on_two_ranks() -> None:
    """DDP around it, by Lightning's own strategy."""
    (native, *ours), (other, *_) = on_two_ranks(on_a_rank)
    assert native == other
    for found in ours:
        assert found == pytest.approx(native, abs=1e-11)
