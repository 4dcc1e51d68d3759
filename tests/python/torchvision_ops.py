"""timm and open_clip import torchvision, whose wheel wants operators of its compiled part, which is
for one build of torch alone. Nothing here calls them: declared, they let it be imported beside any."""

import importlib.util

import torch

_OPS = ("nms", "qnms")
_library = torch.library.Library("torchvision", "FRAGMENT")
if importlib.util.find_spec("torchvision") is not None:
    for _op in _OPS:
        if not hasattr(torch.ops.torchvision, _op):
            _library.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
