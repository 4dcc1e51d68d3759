"""Ways out of errors about models, options and calls: what provokes one, and what its message says."""

import infinitybatch as ib
import torch
from followed_support import Case, exact
from misuse_support import CRITERION, X, Y, step
from support import Calls, mlp
from test_misuse import MISUSES as MODELS
from test_misuse_calls import MISUSES as CALLS
from test_misuse_options import MISUSES as OPTIONS
from torch import nn

WHOLE = lambda m: CRITERION(m(X), Y)  # noqa: E731


def loaded():
    model = mlp().to("meta").to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict())
    return model


def run_once():
    model = nn.Sequential(nn.LazyLinear(5)).double()
    model(X[:2])
    return model


def frozen():
    return mlp().requires_grad_(False)


def made_in_inference_mode():
    with torch.inference_mode():
        return X.clone()


CASES: list[Case] = [
    # Models.
    (
        "model is the class {} itself; give an instance: {}(...)",
        MODELS["a model's class"][0],
        lambda: exact(nn.Linear(6, 5).double()),
    ),
    (
        "make a model of any other callable and its parameters with infinitybatch.make_model",
        MODELS["a model that is a function"][0],
        lambda: step(
            model=ib.make_model(lambda x: x @ WEIGHT, [WEIGHT]),
        ),
    ),
    (
        "parameters must be a list of tensors, not {}",
        MODELS["parameters that are a number"][0],
        lambda: ib.make_model(torch.sin, [WEIGHT]),
    ),
    (
        "pass parameters as a list of the tensors whose gradients are wanted",
        MODELS["parameters that are no tensors"][0],
        lambda: ib.make_model(torch.sin, [WEIGHT]),
    ),
    (
        "forward must be callable, not {}",
        MODELS["a model of what is not callable"][0],
        lambda: ib.make_model(torch.sin, []),
    ),
    (
        "they stand the other way round, VirtualBatch(model, loss)",
        MODELS["model and loss swapped"][0],
        lambda: exact(mlp(), loss=nn.CrossEntropyLoss()),
    ),
    (
        "check that the model's parameters require grad and that its outputs are not detached",
        MODELS["outputs are detached"][0],
        lambda: exact(Calls(lambda self, x: self.net(x), net=mlp())),
    ),
    (
        "run the model once on a few samples, model(inputs[:2])",
        MODELS["lazy parameters"][0],
        lambda: exact(run_once()),
    ),
    (
        'load it first, as in model.to_empty(device="cpu").load_state_dict(...)',
        MODELS["parameters on meta"][0],
        lambda: exact(loaded()),
    ),
    (
        "was made in inference mode and cannot take part in autograd; clone it outside",
        lambda: step(inputs=made_in_inference_mode()),
        lambda: exact(inputs=made_in_inference_mode().clone()),
    ),
    (
        "backward() needs gradients: call it outside torch.no_grad()",
        MODELS["under no_grad"][0],
        lambda: exact(),
    ),
    (
        "backward() needs gradients: call it outside torch.inference_mode()",
        MODELS["in inference mode"][0],
        lambda: exact(),
    ),
    (
        "shards parameters while it runs; pass a model whose parameters are whole tensors",
        MODELS["FSDP"][0],
        lambda: exact(),
    ),
    (
        "whose gradient cannot be summed exactly yet; pass a model whose parameters are plain",
        MODELS["a tensor subclass"][0],
        lambda: exact(),
    ),
    # Options.
    (
        "micro_batch_size is {}; it is a number of samples, 1 or more",
        OPTIONS["micro_batch_size 0"][0],
        lambda: exact(micro_batch_size=1),
    ),
    (
        "{} must be a whole number of {}, not {}",
        OPTIONS["micro_batch_size a fraction"][0],
        lambda: exact(micro_batch_size=2),
    ),
    (
        "which is not a valid memory budget",
        OPTIONS["a budget of nonsense"][0],
        lambda message: budgets(message),
    ),
    (
        "but a budget has at least one byte",
        OPTIONS["a budget of 0"][0],
        lambda message: budgets(message),
    ),
    (
        "but a fraction of the device is above 0 and at most 1",
        OPTIONS["a budget of more than all"][0],
        lambda: exact(memory_budget=0.5),
    ),
    (
        'text such as "512MiB", a fraction of the device (0.8) or "auto", not {}',
        OPTIONS["a budget of another type"][0],
        lambda: [exact(memory_budget=given) for given in (1 << 30, "512MiB", 0.8, "auto")],
    ),
    (
        "{} is a whole number of more than 64 bits; it is a number of bytes, 1 to 2^63 - 1",
        OPTIONS["a budget of more than 64 bits"][0],
        lambda: exact(memory_budget=2**63 - 1),
    ),
    (
        "it is a number of {} below 2^63",
        OPTIONS["micro_batch_size of more than 64 bits"][0],
        lambda: exact(micro_batch_size=2**63 - 1),
    ),
    (
        "{} is {}; it is True or False",
        OPTIONS["a truth value in words"][0],
        lambda: exact(static_graph=False),
    ),
    (
        "it is a number of bytes per second, or 0 to leave copies alone",
        OPTIONS["a bandwidth below 0"][0],
        lambda: exact(offload=ib.Offload(host_bandwidth=0)),
    ),
    (
        "{} must be a number of bytes per second, not {}",
        OPTIONS["a bandwidth in words"][0],
        lambda: exact(offload=ib.Offload(host_bandwidth=1e9)),
    ),
    (
        "{} must be a path, not {}",
        OPTIONS["a directory that is a number"][0],
        lambda: exact(offload=ib.Offload(directory="/tmp")),
    ),
    (
        "{} without micro_batch_size; a plan for a memory_budget keeps as many graphs as fit",
        OPTIONS["retained_micro_batches without a size"][0],
        lambda: (exact(micro_batch_size=4, retained_micro_batches=2), exact(memory_budget="1GiB")),
    ),
    (
        "{} without micro_batch_size; a plan for a memory_budget chooses the segments itself",
        lambda: step(checkpoint_segments=2),
        lambda: (exact(micro_batch_size=4, checkpoint_segments=2), exact(memory_budget="1GiB")),
    ),
    (
        "{}; it is a number of micro-batches, 0 or more",
        lambda: step(micro_batch_size=4, retained_micro_batches=-1),
        lambda: exact(micro_batch_size=4, retained_micro_batches=0),
    ),
    (
        "{}; it is a number of segments, 2 or more",
        lambda: step(micro_batch_size=4, checkpoint_segments=1),
        lambda: exact(micro_batch_size=4, checkpoint_segments=2),
    ),
    (
        "together with retained_micro_batches, which keeps whole graphs; leave one of them out",
        lambda: step(micro_batch_size=4, checkpoint_segments=2, retained_micro_batches=1),
        lambda: (exact(checkpoint_segments=2), exact(retained_micro_batches=1)),
    ),
    (
        "together with use_tapes=False, but segments are pieces of the recording of forward",
        lambda: step(micro_batch_size=4, checkpoint_segments=2, use_tapes=False),
        lambda: (exact(checkpoint_segments=2), exact(use_tapes=False)),
    ),
    (
        "which skips your forward and with it the activations that segments keep; leave static_graph out",
        lambda: step(micro_batch_size=4, checkpoint_segments=2, static_graph=True),
        lambda: exact(checkpoint_segments=2),
    ),
    (
        "static_graph=True reuses the recording of forward, which use_tapes=False forbids",
        lambda: step(micro_batch_size=4, static_graph=True, use_tapes=False),
        lambda: (exact(static_graph=True), exact(use_tapes=False)),
    ),
    (
        'which batch_coupling="per_micro_batch" forbids; leave one of them out',
        lambda: step(micro_batch_size=4, static_graph=True, batch_coupling="per_micro_batch"),
        lambda: (exact(static_graph=True), exact(batch_coupling="per_micro_batch")),
    ),
    (
        "match_native_rng=True needs the recording of forward and batch_coupling",
        lambda: step(micro_batch_size=4, match_native_rng=True, use_tapes=False),
        lambda: (
            exact(match_native_rng=True),
            exact(use_tapes=False, batch_coupling="per_micro_batch"),
        ),
    ),
    (
        "{} must be callable with a MicroBatch, not {}",
        OPTIONS["a callback that is none"][0],
        lambda: exact(on_micro_batch=lambda micro_batch: None),
    ),
    (
        "must have a method `scale` as torch.amp.GradScaler has, not be a {}",
        OPTIONS["a grad_scaler that is none"][0],
        lambda: step(grad_scaler=torch.amp.GradScaler("cpu"), micro_batch_size=4),
    ),
    (
        "{} has no argument {}",
        CALLS["a misspelt option"][0],
        lambda message: exact(**{message.split("did you mean ")[1].split("=")[0]: 4}),
    ),
    (
        "{} takes options by name: {}({}, {}={})",
        CALLS["a size by position"][0],
        lambda: exact(micro_batch_size=4),
    ),
    (
        "{} takes options by name: {}({}, {}={})",
        CALLS["an option by position"][0],
        lambda: exact(wrapped=True, memory_budget="32MiB"),
    ),
    (
        "{} is the class {} itself; give an instance: {}(...)",
        CALLS["a scaler's class"][0],
        lambda: step(grad_scaler=torch.amp.GradScaler("cpu"), micro_batch_size=4),
    ),
    (
        "a VirtualBatch is not called: write batch.backward(inputs, targets)",
        CALLS["a VirtualBatch called"][0],
        lambda: ib.VirtualBatch(mlp(), CRITERION, micro_batch_size=4).backward(X, Y),
    ),
    (
        "{} is '{}', but torch finds no {} here",
        lambda: ib.losses.coupled(CRITERION, loss_device="cuda"),
        lambda: exact(loss=ib.losses.coupled(CRITERION, loss_device="cpu"), natively=WHOLE),
    ),
    (
        "which is not a device; write 'cpu', 'cuda' or 'cuda:1'",
        lambda: ib.losses.coupled(CRITERION, loss_device="foo"),
        lambda: exact(loss=ib.losses.coupled(CRITERION, loss_device="cpu"), natively=WHOLE),
    ),
    (
        'must be a torch.device or its name ("cpu"), not {}',
        OPTIONS["a device that is none"][0],
        lambda: ib.memory.reset_peak("cpu"),
    ),
    (
        "but a budget has at least one byte",
        lambda: ib.memory.limit(0),
        lambda: ib.memory.limit(536870912),
    ),
    (
        "function must be callable, not {}",
        CALLS["a tape of no function"][0],
        lambda: ib.tape.record(torch.sin, (X,)),
    ),
    (
        "inputs must be the tuple of arguments, not {}: record(function, (x,))",
        CALLS["a tape of a tensor"][0],
        lambda: ib.tape.record(torch.sin, (X,)),
    ),
    (
        "this context manager is entered already; make another one",
        lambda: entered(2),
        lambda: entered(1),
    ),
]

WEIGHT = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)


def budgets(message):
    for given in ("536870912", '"512MiB"', '"auto"'):
        if given in message:
            exact(memory_budget=eval(given))


def entered(times):
    limit = ib.memory.limit(1 << 30)
    with limit:
        if times > 1:
            with limit:
                pass
