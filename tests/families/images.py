"""Runs the image models of timm, which nobody here wrote, beside the native whole batch.

    python tests/families/images.py [module …]        # compare with images.json
    python tests/families/images.py --write [module …]  # write it anew

Needs the package timm, which is no requirement of infinitybatch; nothing is downloaded. Of each of
its modules the smallest model is taken, at random, in training mode, with dropout and the like
switched off, in float64. `streaming` and `wrap` are those of run.py; with a BatchNorm in the model
streaming goes from layer to layer. Buffers, running statistics above all, are compared too.
"""

import os
import pathlib
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")

import timm  # noqa: E402
import torch  # noqa: E402
from compare import N, beside_native  # noqa: E402
from listing import run_listed, without_chance  # noqa: E402
from torch import nn  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "images.json"
MOST_PARAMETERS = 30_000_000
RANDOM = ("drop_prob", "drop_rate", "p", "attn_drop", "proj_drop")


def smallest(module: str) -> tuple[int, str]:
    """Parameters and name of the module's smallest model."""
    found = []
    for name in timm.list_models(module=module):
        try:
            with torch.device("meta"):
                model = timm.create_model(name, num_classes=4)
        except Exception:  # some need weights, or other packages
            continue
        found.append((sum(p.numel() for p in model.parameters()), name))
    return min(found, default=(0, ""))


def build(name: str) -> tuple[nn.Module, int]:
    """The model and the side of the smallest images that it takes."""
    failure: Exception | None = None
    for fixed in (64, 96, 128, None):
        try:
            torch.manual_seed(0)
            size = {} if fixed is None else {"img_size": fixed}
            model = timm.create_model(name, num_classes=4, **size).eval()
        except Exception as error:  # models refuse with errors of every kind
            failure = error
            continue
        for side in [fixed] if fixed else [64, 96, 128, 192, 224, 256]:
            try:
                with torch.no_grad():
                    model(torch.randn(1, 3, side, side))
                return model, side
            except Exception as error:
                failure = error
    raise RuntimeError(f"{name} takes no image that was tried") from failure


def outcome(module: str) -> dict[str, str]:
    parameters, name = smallest(module)
    if not name or parameters > MOST_PARAMETERS:
        return {"model": name, "left out": f"{parameters:,} parameters in its smallest model"}
    model, side = build(name)
    torch.manual_seed(1)
    images = torch.randn(N, 3, side, side, dtype=torch.float64)
    return {"model": name, **beside_native(without_chance(model, RANDOM), {"x": images})}


if __name__ == "__main__":
    sys.exit(run_listed(RESULTS, timm.list_modules, outcome, versions={"timm": timm.__version__}))
