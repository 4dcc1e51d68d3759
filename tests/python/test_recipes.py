"""docs/recipes: each page's code runs as it is printed, and in micro-batches trains the weights that
it trains without infinitybatch, to 1e-9 in fp64."""

import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torchvision_ops  # noqa: F401 (first: torchmetrics imports torchvision where it is there)
from adapter_support import same_weights
from ranks_support import on_two_ranks
from torch import distributed

RECIPES = Path(__file__).resolve().parents[2] / "docs/recipes"
#: Packages that are not in requirements-loops.txt because they bring a torch of their own.
OPTIONAL = {"timm": "timm", "open_clip": "open_clip"}
HOW = "needs {}: pip install --no-deps -r requirements-images.txt"
PAGES = ["accelerate", "lightning", "metric-learning", "open_clip", "timm"]
WRAP = ib.wrap


def blocks(page: str) -> list[str]:
    text = (RECIPES / f"{page}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def natively(model: Any, **_: Any) -> Any:
    return model


def in_micro_batches(model: Any, **options: Any) -> Any:
    return WRAP(model, **{k: v for k, v in options.items() if k == "methods"}, micro_batch_size=5)


def run(page: str, wrap: Callable[..., Any] | None) -> dict[str, Any]:
    """The names of the page's code, run with `wrap` in place of ib.wrap."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if wrap is not None:
            patch.setattr(ib, "wrap", wrap)
            patch.setattr(ib, "unwrap", lambda model: model)
        if page == "lightning":
            from infinitybatch import lightning

            logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
            if wrap is natively:
                callback = lightning._package().Callback
                patch.setattr(lightning, "InfinityBatch", lambda *_, **__: callback())
            elif wrap is not None:
                patch.setattr(lightning, "wrap", wrap)
        for block in blocks(page):
            exec(compile(block, f"docs/recipes/{page}.md", "exec"), names)
    return names


@pytest.fixture
def fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    if "accelerate" in globals():
        globals()["accelerate"].state.AcceleratorState._reset_state(True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_trains_what_it_trains_without(page: str, fp64: None) -> None:
    if page in OPTIONAL:
        if importlib.util.find_spec(OPTIONAL[page]) is None:
            pytest.skip(HOW.format(OPTIONAL[page]))
    wanted = run(page, natively)
    found = run(page, in_micro_batches)
    printed = run(page, None)
    for names in (found, printed):
        same_weights(names["model"].state_dict(), wanted["model"].state_dict())
    if page == "timm":  # beside the weights: the moving average, running statistics in both
        same_weights(found["average"].module.state_dict(), wanted["average"].module.state_dict())
    if page == "metric-learning":
        assert found["memory"].queue_idx == wanted["memory"].queue_idx > 0
    if page != "lightning":
        model = found["model"]
        assert max(model.last_report.micro_batch_sizes) == 5
        assert type(wanted["model"]) is not type(model)


def on_a_rank(rank: int) -> Any:
    results = []
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "init_process_group", lambda *_: None)  # as it is already
        for wrap in (natively, in_micro_batches, None):
            names = run("ddp", wrap)
            results.append([p.flatten().tolist() for p in names["model"].parameters()])
    return results


def test_ddp() -> None:
    first, second = on_two_ranks(on_a_rank)
    assert first == second  # ranks have the same weights
    native, *ours = first
    for found in ours:
        for a, b in zip(found, native, strict=True):
            assert a == pytest.approx(b, abs=1e-12)


def test_each_recipe_is_run() -> None:
    pages = {path.stem for path in RECIPES.glob("*.md") if blocks(path.stem)}
    assert pages >= {*PAGES, "ddp", "compile"}  # compile.md: test_compile_table.py
