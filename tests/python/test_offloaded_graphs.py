"""Graphs that are kept for a coupled loss wait away from the device, in place of second forwards."""

import textwrap
from ctypes import string_at

import infinitybatch as ib
import pytest
import torch
from fault_support import assert_a_full_disk_leaves_everything, assert_a_kill_leaves_nothing
from support import Calls, Log, Square, gradient_error, native_gradients, until_quiet
from torch import nn
from torch.utils.checkpoint import checkpoint

HOST = {"host_budget": "1GiB", "disk": False}
SAMPLES, TIME, WIDTH, SIZE = 22, 3, 16, 4
COUNT = 6  # of micro-batches: five of four, one of two


def spread(outputs, targets):
    """Couples every sample with every other."""
    outputs = outputs.double() - targets
    return (torch.cdist(outputs, outputs) ** 2).mean() + outputs.std(0).sum()


class Kept(torch.autograd.Function):
    """Keeps one tensor as torch likes it, and one by itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.own = x.exp()
        return x * ctx.own

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.own * (1 + x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.mean(1))))


def in_place(self, x):
    h = self.net(x).mul_(2).add_(x)
    h[:, 0] += h[:, 1].exp()
    return h.sigmoid_().mean(1).relu_()


def views(self, x):
    left, right = self.net(x).chunk(2, -1)
    h = torch.cat([left.transpose(1, 2), right.mT], 1).flatten(1)[:, ::3]
    return (h[:, :WIDTH] * h[:, :WIDTH].t().contiguous().t()).expand(-1, WIDTH)


def autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.net(x.float()).tanh().mean(1)


def checkpointed(self, x):
    return self.head(checkpoint(self.net, x, use_reentrant=False)).mean(1)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def deep():
    return nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh())


def attention():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


KINDS = {
    "plain": lambda: Calls(lambda self, x: self.net(x).mean(1), net=deep()),
    "lstm": lambda: Calls(
        lambda self, x: self.net(x)[0][:, -1], net=nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
    ),
    "attention": lambda: Calls(lambda self, x: self.net(x).mean(1), net=attention()),
    "convolution": lambda: Calls(
        lambda self, x: self.net(x.mT).mean(2),
        net=nn.Sequential(nn.Conv1d(WIDTH, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(True)),
    ),
    "checkpoint": lambda: Calls(checkpointed, net=deep(), head=linear()),
    "in place": lambda: Calls(in_place, net=linear()),
    "views": lambda: Calls(views, net=linear()),
    "tied": Tied,
    "autocast": lambda: Calls(autocast, net=deep().float()),
    "dropout": lambda: Calls(
        lambda self, x: self.net(x).mean(1), net=nn.Sequential(deep(), nn.Dropout(0.4))
    ),
    "function": lambda: Calls(lambda self, x: Kept.apply(Square.apply(self.net(x))), net=linear()),
    "buffer": lambda: Calls(
        lambda self, x: self.net(x).mean(1) * self.scale, net=deep(), scale=torch.rand(WIDTH)
    ),
}


def model_of(kind):
    torch.manual_seed(0)
    model = KINDS[kind]()
    if kind == "function":
        model = Calls(lambda self, x: self.inner(x).mean(1), inner=model)
    return model if kind == "autocast" else model.double()


def data(samples=SAMPLES):
    torch.manual_seed(1)
    return torch.randn(samples, TIME, WIDTH).double(), torch.randn(samples, 1).double()


def steps(kind, **options):
    """What three steps leave, the last one's report, which looks at no rows, and the model."""
    model = model_of(kind)
    calls = Log()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = ib.VirtualBatch(model, ib.losses.coupled(spread), micro_batch_size=SIZE, **options)
    left = []
    for _ in range(3):
        calls.clear()
        model.zero_grad()
        report = batch.backward(*data())
        left += [report.loss, *(p.grad for p in model.parameters()), *model.buffers()]
        left = [tensor.clone() for tensor in left]
    return left, report, batch.plan, model, len(calls)


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_graphs_give_the_bits_of_others_and_of_second_forwards(kind):
    again = steps(kind, offload="never")[0]
    kept = steps(kind, offload="never", retained_micro_batches=COUNT)[0]
    assert all(map(torch.equal, again, kept))
    for where in (HOST, {"host_budget": "3KiB"}, {}):
        for retained in (COUNT, 2):
            left, report, plan, model, calls = steps(
                kind, offload=ib.Offload("always", **where), retained_micro_batches=retained
            )
            assert all(map(torch.equal, left, kept)), where
            assert calls == COUNT or retained == 2
            plan = plan(*data())
            assert (plan.retained, plan.offloaded_graphs) == (retained, retained)
            assert 0 < plan.offloaded_graph_bytes <= plan.offloaded_bytes
            # What the function keeps by itself is Python's.
            assert (plan.stayed_graph_bytes > 0) == (kind == "function")
            assert f"{retained} of these offloaded" in plan.explain()
    if kind not in ("dropout", "autocast"):
        assert gradient_error(model, native_gradients(model, spread, *data())) <= 1e-12


def test_each_storage_moves_once():
    def forward(self, x):
        h = torch.tanh(self.net(x))
        return h * h.view(-1).view_as(h) + h.t().sin().t() * h.detach()

    model = Calls(forward, net=nn.Linear(WIDTH, WIDTH)).double()
    x = torch.randn(SAMPLES, WIDTH).double()
    batch = ib.VirtualBatch(
        model,
        ib.losses.coupled(lambda out, _: out.std(0).sum()),
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    batch.backward(x)
    plan = batch.plan(x)
    # h, and what the model returned.
    assert plan.offloaded_graph_bytes == 2 * x.nbytes
    assert plan.stayed_graph_bytes == 0
    # Beside that its copy for the loss, and later its gradient.
    assert plan.offloaded_bytes == 4 * x.nbytes


@pytest.mark.parametrize("how", ["attribute", "hook", "numpy", "callback"])
def test_what_others_hold_stays_where_it_is(how):
    kept = []

    def forward(self, x):
        h = torch.tanh(self.net(x))
        if how == "attribute":
            self.map = h
        if how == "numpy":
            kept.append(h.detach().numpy())
        return self.head(h).mean(1)

    net, head = linear(), linear()
    model = Calls(forward, net=net, head=head).double()
    if how == "hook":
        head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))

    def loss(outputs, targets):
        # By no operator of torch's: the loss may not read past its outputs.
        for each in [*kept, *([model.map] if how == "attribute" else [])]:
            held = each.tobytes() if how == "numpy" else string_at(each.data_ptr(), each.nbytes)
            assert any(held)
        return spread(outputs, targets)

    batch = ib.VirtualBatch(
        model,
        ib.losses.coupled(loss),
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
        on_micro_batch=(lambda micro: kept.append(micro.outputs)) if how == "callback" else None,
    )
    x, y = data()
    wanted = native_gradients(model, spread, x, y)
    del kept[:]
    batch.backward(x, y)
    assert gradient_error(model, wanted) <= 1e-12
    del kept[:]
    plan = batch.plan(x, y)
    # What the next forward let go of has left after it: a list, too, is as one forward fills it.
    last = SAMPLES % SIZE / SAMPLES
    stays = {"attribute": last, "hook": last, "callback": 1 / TIME}
    assert plan.stayed_graph_bytes == stays.get(how, 1) * x.nbytes
    assert "stayed" in plan.explain()


def wide(layers=6, width=64):
    torch.manual_seed(0)
    stack = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*stack, nn.Linear(width, 2)).double()


def centred(outputs, _):
    return outputs.mean(0).pow(2).sum()


def test_the_peak_is_flat_in_the_number_of_micro_batches():
    above = {"never": [], "always": []}
    for offload, peaks in above.items():
        for micro_batches in (4, 16, 64):
            model = wide()
            x = torch.randn(8 * micro_batches, 64).double()
            batch = ib.VirtualBatch(
                model,
                ib.losses.coupled(centred),
                micro_batch_size=8,
                retained_micro_batches=micro_batches,
                offload=ib.Offload(offload, **HOST),
            )
            for _ in range(2):
                batch.backward(x)
                model.zero_grad()
            live = ib.memory.stats("cpu").live
            peaks.append(batch.backward(x).peak_bytes - live)
    assert len(set(above["always"])) == 1, above
    assert above["never"][2] > 5 * above["always"][2]


def planned(bandwidth, room=2.0, width=64, count=64, steps=8, **where):
    """A budget of so many MiB more than there is; the last of a few steps, and the plan."""
    model = Calls(lambda self, x: self.net(x).mean(1), net=wide(8, width))
    x = torch.randn(count, 16, width).double()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    calls = []
    model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    batch = ib.VirtualBatch(
        model,
        ib.losses.coupled(centred),
        memory_budget=ib.memory.stats("cpu").live + gradients + int(room * 2**20),
        offload=ib.Offload("always", host_bandwidth=bandwidth, **{**HOST, **where}),
    )
    for _ in range(steps):
        calls.clear()
        model.zero_grad()
        report = batch.backward(x)
    rows = sum(calls)
    error = gradient_error(model, native_gradients(model, centred, x, None))
    for parameter in model.parameters():
        parameter.grad = None
    return report, batch.plan(x), rows, error


@pytest.mark.parametrize("room", [0.7, 2.0])
@until_quiet
def test_a_fast_link_beats_second_forwards_and_the_peak_is_predicted(room):
    report, plan, rows, error = planned(0.0, room)
    assert report.peak_bytes <= report.memory_budget
    assert report.predicted_peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)
    assert plan.offloaded_graphs == plan.retained == len(plan.micro_batch_sizes) > 1
    assert plan.offloaded_bytes == report.offloaded_bytes > plan.offloaded_graph_bytes > 2**20
    assert rows == 64
    assert "graphs are offloaded: of their copies" in plan.reason
    assert "predicted for the next" in plan.explain()
    assert error <= 1e-12


@until_quiet
def test_however_copies_run_the_peak_is_predicted():
    """Copies and second forwards take about as long here; which is faster the machine decides."""
    report, plan, rows, error = planned(3e8, width=192, count=32)
    assert report.peak_bytes <= report.memory_budget
    assert report.predicted_peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)
    assert error <= 1e-12
    assert plan.offloaded_graphs in (0, len(plan.micro_batch_sizes))
    if plan.offloaded_graphs > 0:
        assert rows == 32


@until_quiet
def test_a_slow_link_does_not():
    report, plan, _, error = planned(3e7, steps=6)  # on a noisy machine sizes are timed for longer
    assert plan.offloaded_graphs == plan.retained == plan.offloaded_graph_bytes == 0
    assert "graphs are not offloaded: of their copies" in plan.reason
    assert report.peak_bytes <= report.memory_budget
    assert error <= 1e-12


def test_a_host_that_is_too_small_for_graphs_is_no_error():
    report, plan, _, _ = planned(0.0, host_budget="100KiB", steps=3)
    assert plan.offloaded_graphs == 0
    assert "graphs are not offloaded: offload" in plan.reason
    assert 0 < report.offloaded_bytes


@pytest.mark.parametrize("offload", ["auto", "never"])
def test_graphs_that_do_not_fit_are_offloaded_where_they_were_asked_for(offload):
    model, x = wide(), torch.randn(128, 64).double()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    batch = ib.VirtualBatch(
        model,
        ib.losses.coupled(centred),
        micro_batch_size=8,
        retained_micro_batches=16,
        memory_budget=ib.memory.stats("cpu").live + gradients + 150 * 2**10,
        offload=ib.Offload(offload, **HOST),
    )
    if offload == "never":
        with pytest.raises(ib.BudgetExceeded):
            batch.backward(x)
        return
    restarts = []
    for _ in range(2):
        model.zero_grad()
        report = batch.backward(x)
        restarts.append(report.restarts)
        assert report.peak_bytes <= report.memory_budget
    assert restarts[0] > 0 and restarts[1] == 0
    assert gradient_error(model, native_gradients(model, centred, x, None)) <= 1e-12
    model.zero_grad()
    assert batch.plan(x).offloaded_graphs == 16


def test_a_full_disk_is_a_typed_error_and_leaves_everything_as_it_was():
    model = model_of("dropout")
    options = {"micro_batch_size": SIZE, "retained_micro_batches": COUNT}
    batch = ib.VirtualBatch(model, ib.losses.coupled(spread), offload="always", **options)
    plain = ib.VirtualBatch(model, ib.losses.coupled(spread), **options)
    assert_a_full_disk_leaves_everything(model, batch, plain, *data())


def test_nothing_is_left_behind_after_a_kill(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        import torch
        from torch import nn
        import infinitybatch as ib
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        # While the loss is at work the graphs of all are away.
        batch = ib.VirtualBatch(model, ib.losses.coupled(lambda *_: os.kill(os.getpid(), signal.SIGKILL)),
                                micro_batch_size=4, retained_micro_batches=16, offload=ib.Offload("always", directory=sys.argv[1]))
        batch.backward(torch.randn(64, 32))
        """)
    assert_a_kill_leaves_nothing(script, tmp_path)
