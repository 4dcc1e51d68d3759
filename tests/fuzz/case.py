"""One random case: a model, what it returns, a loss, a way to compute it, and the steps taken."""

from dataclasses import dataclass, field, replace

from .losses import LOSSES, LOSSES_OF_OBJECTS, Loss
from .outputs import OUTPUTS, Output
from .statement import WIDTH, Statement
from .statements_words import LOSSES_OF_WORDS, OUTPUTS_OF_WORDS

HEAD = """\
import collections
import functools
import random

import infinitybatch as ib
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

W, CLASSES = {width}, 4
FIRED = collections.Counter()  # calls of hooks


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Bomb(Exception):
    pass


FUSE = [0]  # forwards until one fails; none does where it is not above 0


def tick():
    FUSE[0] -= 1
    if FUSE[0] == 0:
        raise Bomb("of the user's own")


class Dial:
    by = 0.7
"""

#: Of models with settings that the loop changes between steps, and that are no numbers themselves.
TURN = """

def turn(model, step):
    for name, dial in list(vars(model).items()):
        if not name.startswith("dial"):
            continue
        by = 0.7 + 0.3 * (step // 2)
        if isinstance(dial, dict):
            dial["by"] = by
        elif isinstance(dial, functools.partial):
            setattr(model, name, functools.partial(torch.mul, other=by))
        elif isinstance(dial, type):
            dial.by = by
        elif hasattr(dial, "by"):
            setattr(model, name, Dial())
            vars(model)[name].by = by
        else:
            setattr(model, name, eval(f"lambda h: h * {by}"))
"""

#: Of models that read padded sequences.
PADDED = '''

def padded(rows, longest, left, g):
    """A mask of which most rows are short, and one as long as any."""
    lengths = (torch.rand(rows, generator=g).square() * longest).long() + 1
    lengths[rows // 2] = longest
    real = (torch.arange(longest) < lengths[:, None]).long()
    return real.flip(1) if left else real
'''


@dataclass(frozen=True)
class Way:
    """How the library computes it. What is at its default is not said to the library."""

    #: "stream" (a separable loss), "coupled" (the same, or any other, as a coupled one) or "wrap".
    api: str = "stream"
    #: Samples of a micro-batch; None: all of them, or what a budget allows.
    size: int | None = None
    #: Of what native needs beyond what is there anyway; None: no budget.
    budget: float | None = None
    #: use_tapes, static_graph, checkpoint_segments, offload, match_native_rng, retained_micro_batches.
    options: dict[str, object] = field(default_factory=dict)
    #: A criterion of torch.nn instead of losses.separable.
    criterion: bool = False
    #: With wrap: "once", "two calls", "retain_graph", "no_grad between" or "autograd.grad".
    loop: str = "once"
    #: Gradients of x, too.
    input_gradient: bool = False
    #: What is said of padding, as code.
    trim: str = ""
    #: What is wrapped before: "itself", "the outlet", "each child"; or nothing.
    nested: str = ""


@dataclass(frozen=True)
class Case:
    seed: int
    statements: tuple[Statement, ...]
    output: str
    loss: str
    way: Way
    #: Samples of each step.
    rows: tuple[int, ...]
    momentum: float = 0.0
    #: A look in eval mode after each step.
    evaluate: bool = False
    #: Gradients of all steps add up.
    accumulate: bool = False
    #: What goes wrong in a first try: ("raise", in which forward) or ("memory", which allocation).
    fault: tuple[str, int] | None = None
    #: Positions of the longest sequence of words.
    words: int = 8
    #: Padding stands in front.
    left: bool = False
    #: How `x` lies in memory in each step; plainly in those that are not said.
    layouts: tuple[str, ...] = ()

    @property
    def tags(self) -> frozenset[str]:
        return frozenset().union(*(s.tags for s in self.statements), self.returned.tags)

    @property
    def turns(self) -> bool:
        """Settings are changed between steps."""
        return "dial" in self.tags

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset().union(*(s.inputs for s in self.statements))

    @property
    def criterion(self) -> Loss:
        return (LOSSES | LOSSES_OF_WORDS | LOSSES_OF_OBJECTS)[self.loss]

    @property
    def returned(self) -> Output:
        return (OUTPUTS | OUTPUTS_OF_WORDS)[self.output]

    def having(self, **changes: object) -> "Case":
        return replace(self, **changes)  # type: ignore[arg-type]

    def model_source(self) -> str:
        """A class `Model` and a function `logits` of what it returns."""
        output = self.returned
        init, forward = ["self.inlet = nn.Linear(5, W)"], ["h = self.inlet(x)", "kept = [h]"]
        for number, statement in enumerate(self.statements):
            made, run = statement.numbered(number)
            init += made
            forward += run
        init += ["self.out = nn.Linear(W, CLASSES)", *filter(None, [output.init])]
        if self.fault is not None and self.fault[0] == "raise":
            forward.append("tick()")
        forward.append(f"return {output.returned}")
        arguments = ", ".join(["self", "x", *sorted(self.inputs)])
        lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in init]
        lines += ["", f"    def forward({arguments}):", *(f"        {line}" for line in forward)]
        lines += ["", "", "def logits(outputs):", f"    return {output.logits}"]
        head = HEAD.format(width=WIDTH) + PADDED * ("mask" in self.inputs)
        head += TURN * self.turns
        return head + "\n\n" + "\n".join(lines) + "\n"

    def loss_source(self) -> str:
        """`loss(outputs, targets)`, and `ours`, what VirtualBatch is given for it."""
        loss = self.criterion
        native = f"def loss(outputs, y):\n    z = logits(outputs)\n    return {loss.value}\n"
        if self.way.api == "wrap":
            return native
        if self.way.api == "coupled":
            ours = "ours = ib.losses.coupled(loss)"
        elif self.way.criterion:
            ours = f"ours = {loss.criterion}"
        else:
            part = "None" if loss.denominator == "None" else f"lambda y: {loss.denominator}"
            ours = (
                f"def summed(outputs, y):\n    z = logits(outputs)\n    return {loss.sum}\n\n\n"
                f"ours = ib.losses.separable(summed, {part})"
            )
        return f"{native}\n\n{ours}\n"

    def source(self) -> str:
        return f"{self.model_source()}\n\n{self.loss_source()}"

    def __str__(self) -> str:
        names = ", ".join(s.name for s in self.statements) or "nothing"
        more = "".join([", eval"] * self.evaluate + [", accumulated"] * self.accumulate)
        more += f", fault {self.fault}" if self.fault else ""
        more += f", lying {self.layouts}" if self.layouts else ""
        return f"[{names}] -> {self.output}, {self.loss}, rows {self.rows}{more}, {self.way}"
