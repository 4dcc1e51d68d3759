"""Ways out of errors about losses: what provokes one, and what its message says."""

from functools import partial

import infinitybatch as ib
import torch
from followed_support import Case, exact
from misuse_support import CRITERION, X, Y, step
from support import Calls, mlp
from test_misuse_calls import MISUSES as CALLS
from test_misuse_losses import MISUSES as LOSSES
from test_misuse_losses import Wrapped, own_denominator, own_loss, returns
from test_tiled_losses import MISUSES as TILED
from test_tiled_losses import A, B
from torch import nn
from torch.nn import functional as F

losses = ib.losses
WHOLE = lambda m: CRITERION(m(X), Y)  # noqa: E731
CLASSES = torch.randint(5, (12,))
NORMAL = lambda o, t: F.cross_entropy(o, t, reduction="sum")  # noqa: E731


def of(function):
    """A step with a loss of outputs and targets, streamed and coupled."""
    exact(loss=function)
    exact(loss=losses.coupled(function), natively=lambda m: function(m(X), Y))


def with_loss(denominator=len):
    """A model that returns its loss."""

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.net(x), labels)}

    step(
        Calls(forward, net=mlp()),
        {"x": X, "labels": Y},
        Y,
        losses.from_model(denominator),
        micro_batch_size=4,
    )


def tiled(**options):
    options.setdefault("temperature", 0.1)
    losses.info_nce(A.clone().requires_grad_(), B, **options).backward()


def head(targets=None, weight=B, **options):
    targets = torch.tensor([0, 1, 2, 3]) if targets is None else targets
    losses.linear_cross_entropy(A.clone().requires_grad_(), weight, targets, **options).backward()


CASES: list[Case] = [
    (
        "{} must return a scalar tensor, not {}",
        LOSSES["a loss that returns a number"][0],
        lambda: of(lambda o, t: CRITERION(o, t)),
    ),
    (
        "reduce it with .mean() or .sum(), or leave out reduction",
        LOSSES["a loss for each element"][0],
        lambda: (
            of(lambda o, t: F.cross_entropy(o, t, reduction="none").mean()),
            of(F.cross_entropy),
        ),
    ),
    (
        "{} returned a complex tensor; backward needs a real number, such as value.abs()",
        LOSSES["a complex loss"][0],
        lambda: (
            of(lambda o, t: (o.sum() * 1j).abs()),
            of(lambda o, t: (o.sum() * 1j + o.sum()).real),
        ),
    ),
    (
        "loss is the class {} itself, not an instance of it: {}()",
        LOSSES["a criterion's class"][0],
        lambda: exact(loss=nn.CrossEntropyLoss()),
    ),
    (
        "loss must be a callable, a criterion of torch.nn or one of infinitybatch.losses",
        LOSSES["a loss that is text"][0],
        lambda: (exact(loss=CRITERION), exact(loss=losses.cross_entropy(), natively=WHOLE)),
    ),
    (
        "{} needs targets, but was given {} tensor(s) of them",
        lambda: step(targets=None),
        lambda: exact(targets=Y),
    ),
    (
        "{} needs targets, but was given none of them",
        CALLS["verify without targets"][0],
        lambda: ib.verify(mlp(), CRITERION, X, Y, micro_batch_size=4),
    ),
    (
        "{} takes {}, but was given {} tensor(s) of outputs and {} of targets",
        LOSSES["a model that returns too much"][0],
        lambda: exact(returns(lambda y: y)),
    ),
    (
        "denominator must return a number or a tensor of one, not {}",
        LOSSES["a denominator that is no number"][0],
        lambda: (step(loss=own_denominator(12)), step(loss=own_denominator(torch.tensor(12.0)))),
    ),
    (
        "it is called as denominator(targets) or denominator(targets, samples)",
        LOSSES["a denominator of three arguments"][0],
        lambda: (
            exact(loss=losses.separable(NORMAL, lambda t: len(t)), natively=WHOLE),
            exact(loss=losses.separable(NORMAL, lambda t, samples: samples), natively=WHOLE),
        ),
    ),
    (
        "denominator must be callable as denominator(targets), or None where the loss is the sum itself",
        LOSSES["a denominator that is a number"][0],
        lambda: (
            exact(loss=losses.separable(NORMAL, len), natively=WHOLE),
            exact(loss=losses.separable(NORMAL, None), natively=lambda m: NORMAL(m(X), Y)),
        ),
    ),
    (
        "sum must be callable as sum(outputs, targets), not {}",
        LOSSES["a sum that is a number"][0],
        lambda: exact(loss=losses.separable(NORMAL, len), natively=WHOLE),
    ),
    (
        "penalty must be callable without arguments, not {}",
        LOSSES["a penalty that is a number"][0],
        lambda: penalised(),
    ),
    (
        "denominator must be callable as denominator(targets), not {}",
        LOSSES["from_model without a denominator"][0],
        lambda: with_loss(len),
    ),
    (
        "returned {}; pass it the labels among the inputs, or declare the loss with losses.separable",
        LOSSES["from_model with a model that returns no loss"][0],
        lambda: (with_loss(), exact(loss=losses.separable(NORMAL, len), natively=WHOLE)),
    ),
    (
        "pass the labels as targets too",
        lambda: step(
            Calls(
                lambda self, x, labels: {"loss": F.cross_entropy(self.net(x), labels)}, net=mlp()
            ),
            {"x": X, "labels": Y},
            3,
            losses.from_model(lambda t: 12),
        ),
        lambda: with_loss(),
    ),
    (
        "value must be callable as value(outputs, targets), not {}",
        lambda: losses.coupled(3),
        lambda: exact(loss=losses.coupled(CRITERION), natively=WHOLE),
    ),
    (
        "{} is coupled and sees the whole batch once: add the penalty inside of it",
        lambda: losses.with_penalty(losses.coupled(CRITERION), A.sum),
        lambda: exact(loss=losses.coupled(lambda o, t: CRITERION(o, t) + A.sum()), natively=WHOLE),
    ),
    (
        "{} is the class {} itself; give an instance: {}(...)",
        CALLS["a coupled loss's class"][0],
        lambda: exact(loss=losses.coupled(nn.CrossEntropyLoss()), natively=WHOLE),
    ),
    (
        "{} takes {}, but is called with ({}): {}: ...",
        CALLS["a penalty of the model"][0],
        lambda: penalised(),
    ),
    (
        "register the class with torch.utils._pytree, return its tensors, or give a micro_batch_size as large as the batch; where keep_outputs asks for it use on_micro_batch",
        LOSSES["outputs that nobody knows how to join"][0],
        lambda: kept_by_callback(),
    ),
    (
        "call the model with use_cache=False, or set model.config.use_cache = False",
        LOSSES["a language model's cache among the outputs"][0],
        lambda: ib.wrap(mlp(), micro_batch_size=4)(X),
    ),
    (
        "a mean over samples is then for the loss to take), or (where keep_outputs asks for it) use on_micro_batch instead",
        LOSSES["outputs that cannot be joined"][0],
        lambda: (
            step(
                returns(lambda y: y.sum(1)),
                loss=own_loss(lambda o: o.sum()),
                keep_outputs=True,
                micro_batch_size=4,
            ),
            step(
                returns(lambda y: y.sum(0)),
                loss=own_loss(lambda o: o.sum()),
                on_micro_batch=lambda micro_batch: micro_batch.outputs,
                micro_batch_size=4,
            ),
        ),
    ),
    (
        "{} fixes positional arguments of the loss; fix options by keyword only",
        lambda: step(loss=partial(F.cross_entropy, X)),
        lambda: exact(loss=partial(F.cross_entropy, label_smoothing=0.1)),
    ),
    (
        "{} was given {}, which cannot be used here; it takes {}",
        lambda: step(loss=partial(F.cross_entropy, smoothing=0.1)),
        lambda: exact(loss=partial(F.cross_entropy, label_smoothing=0.1)),
    ),
    # Ready-made ones.
    (
        "'{}' is no reduction; there are 'mean', 'sum' and 'batchmean'",
        lambda: losses.kl_div(reduction="all"),
        lambda: [losses.kl_div(reduction=by) for by in ("mean", "sum", "batchmean")],
    ),
    (
        "reduction 'none' gives one loss per element, and backward needs one number; use 'mean' or 'sum'",
        lambda: step(loss=nn.CrossEntropyLoss(reduction="none")),
        lambda: [exact(loss=nn.CrossEntropyLoss(reduction=by)) for by in ("mean", "sum")],
    ),
    (
        "{} knows the reductions 'mean' and 'sum'; 'batchmean' is kl_div's",
        lambda: losses.mse(reduction="batchmean"),
        lambda: (losses.mse(reduction="sum"), losses.kl_div(reduction="batchmean")),
    ),
    (
        "label_smoothing must be between 0 and 1, not {}",
        lambda: step(loss=losses.cross_entropy(label_smoothing=2.0)),
        lambda: step(loss=losses.cross_entropy(label_smoothing=0.5)),
    ),
    (
        "a model with one output per sample wants binary_cross_entropy_with_logits",
        lambda: step(returns(lambda y: y[:, 0])),
        lambda: exact(
            returns(lambda y: y[:, 0]),
            targets=(Y > 2).double(),
            loss=F.binary_cross_entropy_with_logits,
        ),
    ),
    (
        "class probabilities, which have shape (N, C, ...); class indices must be integers",
        lambda: step(targets=Y.double()),
        lambda: (exact(targets=F.one_hot(Y, 5).double()), exact(targets=Y.double().long())),
    ),
    (
        "{}: p must be 1 or 2, not {}",
        lambda: step(loss=losses.multi_margin(p=3)),
        lambda: [exact(loss=nn.MultiMarginLoss(p=p)) for p in (1, 2)],
    ),
    (
        "so that broadcasting would pair each sample with others; {}",
        lambda: step(returns(lambda y: y[:, :1]), targets=Y.double(), loss=nn.MSELoss()),
        lambda: (
            exact(returns(lambda y: y[:, :1]), targets=Y.double()[:, None], loss=nn.MSELoss()),
            exact(returns(lambda y: y[:, 0]), targets=Y.double(), loss=nn.MSELoss()),
        ),
    ),
    (
        "{} takes targets of the outputs' shape {}, but was given {}",
        lambda: step(returns(lambda y: y[:, :1]), targets=Y.double(), loss=nn.BCEWithLogitsLoss()),
        lambda: exact(
            returns(lambda y: y[:, :1]),
            targets=(Y > 2).double()[:, None],
            loss=nn.BCEWithLogitsLoss(),
        ),
    ),
    (
        "{} has {} samples, {} has {}; every leaf needs the same number: {}",
        lambda: connectionist(LETTERS),
        lambda message: connectionist(
            eval(
                message.split(" as ib.")[1],
                {"losses": losses, "targets": [LETTERS, None, LENGTHS]},
            )
        ),
    ),
    (
        "the variance is negative somewhere; end the model with softplus or exp",
        lambda: gaussian(lambda v: v - 9, step),
        lambda: (gaussian(F.softplus), gaussian(torch.exp)),
    ),
    # Tiled ones.
    (
        "{} takes {} tensors, or none, not {}",
        TILED["one tensor"][0],
        lambda: (tiled(), losses.info_nce()),
    ),
    ("{} takes tensors, not {}", TILED["a list"][0], lambda: tiled()),
    (
        "{} takes embeddings of shapes (N, D) and (M, D), but was given {} and {}",
        TILED["shapes"][0],
        lambda: tiled(),
    ),
    (
        "tile is a number of rows, 1 or more, not {}; leave it out to have it chosen",
        TILED["tile"][0],
        lambda: (losses.siglip(A, B, tile=1), losses.siglip(A, B)),
    ),
    (
        "{} must be a number, a tensor of one, or a function that returns one, not {}",
        TILED["text"][0],
        lambda: (
            tiled(temperature=0.1),
            tiled(temperature=torch.tensor(0.1)),
            tiled(temperature=lambda: torch.tensor(0.1)),
        ),
    ),
    (
        "must be above 0, not {}; learn its logarithm, and give a function that takes exp() of it",
        TILED["temperature"][0],
        lambda: tiled(temperature=lambda: torch.tensor(-1.0).exp()),
    ),
    (
        "{} must be a tensor, not {}",
        TILED["returns"][0],
        lambda: tiled(temperature=lambda: torch.tensor(1.0)),
    ),
    (
        "{} takes one integer label for each of the {} samples, but was given {} of {}",
        TILED["labels"][0],
        lambda: losses.sup_con(A, torch.tensor([0, 1, 0, 1])),
    ),
    (
        "{} of tensors is computed where they are: no loss_device",
        TILED["device"][0],
        lambda: losses.siglip(A, B),
    ),
    (
        "losses.pairwise needs a function of (rows, columns, positions), not {}",
        TILED["function"][0],
        lambda: losses.pairwise(lambda r, c, p: (r @ c.T).sum(), A, B),
    ),
    (
        "it is called as function(rows, columns, positions) or function(rows, columns, positions, targets)",
        TILED["arguments"][0],
        lambda: (
            losses.pairwise(lambda r, c, p: (r @ c.T).sum()),
            losses.pairwise(lambda r, c, p, t: (r @ c.T).sum()),
        ),
    ),
    (
        "softcap must be above 0, or None, not {}",
        TILED["softcap"][0],
        lambda: (head(softcap=30.0), head(softcap=None)),
    ),
    (
        "linear_cross_entropy was given linear_bias twice",
        TILED["bias"][0],
        lambda: head(linear_bias=B[:, 0]),
    ),
    (
        "linear_cross_entropy takes (linear_weight, linear_bias) or (input, linear_weight, target",
        lambda: losses.linear_cross_entropy(A, B, torch.tensor([0, 1, 2, 3]), A[:, 0], B),
        lambda: (
            losses.linear_cross_entropy(B, B[:, 0]),
            losses.linear_cross_entropy(A, B, torch.tensor([0, 1, 2, 3]), B[:, 0]),
        ),
    ),
    (
        "{} takes targets of shape {} beside outputs {} and linear_weight {}",
        TILED["targets"][0],
        lambda: head(torch.zeros(4).long(), torch.randn(7, 3)),
    ),
    (
        "backward with create_graph=True is not possible; use the plain formula on a smaller batch",
        TILED["second derivative"][0],
        lambda: torch.autograd.grad(
            F.cross_entropy((a := A.clone().requires_grad_()) @ B.T, torch.arange(4)),
            a,
            create_graph=True,
        ),
    ),
    (
        "pass retain_graph=True the first time",
        lambda: backward_twice(False),
        lambda: backward_twice(True),
    ),
    (
        "info_nce takes (a, b, logit_scale), and the third must be one floating point number",
        lambda: losses.info_nce(A, B, A),
        lambda: losses.info_nce(A, B, torch.tensor(10.0)),
    ),
]

LETTERS, LENGTHS = torch.randint(1, 5, (30,)), torch.tensor([2, 3] * 6)


def connectionist(targets):
    model = Calls(lambda self, x: self.net(x).log_softmax(-1).transpose(0, 1), net=mlp())
    frames = torch.full((12,), 7)
    batch = ib.VirtualBatch(model, losses.ctc(), micro_batch_size=4)
    batch.backward(torch.randn(12, 7, 6).double(), (targets, frames, LENGTHS))


def gaussian(positive, check=exact):
    model = Calls(lambda self, x: (self.net(x)[:, 0], positive(self.net(x)[:, 1] - 1)), net=mlp())
    natively = lambda m: F.gaussian_nll_loss(m(X)[0], Y.double(), m(X)[1])  # noqa: E731
    options = {"natively": natively} if check is exact else {"micro_batch_size": 4}
    check(model, X, Y.double(), losses.gaussian_nll(), **options)


def penalised():
    model = mlp()
    step(model, loss=losses.with_penalty(CRITERION, lambda: model[0].weight.square().sum()))


def kept_by_callback():
    seen = []
    step(
        returns(lambda y: (y, Wrapped(y))),
        loss=own_loss(lambda o: o[0].sum()),
        on_micro_batch=lambda micro_batch: seen.append(micro_batch.outputs),
        micro_batch_size=4,
    )
    assert len(seen) == 3


def backward_twice(retain):
    loss = losses.info_nce(A.clone().requires_grad_(), B)
    loss.backward(retain_graph=retain)
    loss.backward()
