"""What readers of the first infinitybatch will type: its names, its uses, its helpers."""

import copy
import random
import warnings
import weakref

import infinitybatch
import numpy
import pytest
import torch
import torch.nn.functional as F
from infinitybatch import InfinityBatch, InfinityBatchError, InfinityBatchWarning, tools
from torch import nn

X, Y = torch.randn(24, 6, dtype=torch.float64), torch.randint(3, (24,))
EPOCHS = 3


def loader(size=12):
    """Batches of 12, of which the last is smaller."""
    return list(zip(X[:20].split(size), Y[:20].split(size), strict=True))


def network():
    """Without a bias before BatchNorm: its gradient is zero, and Adam would enlarge rounding."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def native(epochs=EPOCHS):
    """Weights, and losses with the sizes of their batches, as a loop of torch's own gives them."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(epochs):
        losses.append([])
        for inputs, targets in loader():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses[-1].append((loss.item(), len(inputs)))
    return model, losses


def manager(**options):
    """As its README makes one."""
    options = {"micro_batch_size": 5, "verbose": False} | options
    ib = infinitybatch.InfinityBatch(**options)
    ib.model = network()
    ib.criterion = nn.CrossEntropyLoss()
    ib.optimizer = torch.optim.Adam(ib.model.parameters())
    ib.dataloader = loader()
    return ib


def assert_as_native(ib, epochs=EPOCHS):
    model, losses = native(epochs)
    found = tools.compare_networks(ib.model, model, tolerance=1e-12)
    assert found, found
    assert [len(epoch) for epoch in ib.losses] == [len(epoch) for epoch in losses]
    for epoch, wanted in zip(ib.losses, losses, strict=True):
        for (value, size), (its_value, its_size) in zip(epoch, wanted, strict=True):
            assert abs(value - its_value) <= 1e-12 and size == its_size


def test_InfinityBatch_arguments_in_their_order():
    model = network()
    optimizer, criterion = torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss()
    batches = loader()
    ib = InfinityBatch(model, optimizer, criterion, batches, None, False)
    assert (ib.model, ib.optimizer, ib.criterion) == (model, optimizer, criterion)
    assert ib.dataloader is batches and ib.verbose_mode is False
    assert InfinityBatch().model is None and InfinityBatch().verbose_mode is True


def test_everything_by_ib_200():
    ib = manager()
    ib(EPOCHS)
    assert_as_native(ib)


def test_train_is_the_same():
    ib = manager()
    ib.train(EPOCHS)
    assert_as_native(ib)


def test_own_loop_around_epoch():
    ib = manager()
    for _ in range(EPOCHS):
        ib.epoch()
    assert_as_native(ib)


def test_own_loop_around_batch_criterion_backward_step_zero_grad():
    ib = manager()
    for _ in range(EPOCHS):
        for inputs, targets in ib.dataloader:
            outputs = ib.batch_(inputs)
            loss = ib.criterion(outputs, targets)
            loss.backward()
            ib.step()
            ib.zero_grad()
    assert tools.compare_networks(ib.model, native()[0], tolerance=1e-12)


def test_loss_and_backward_by_name_fill_the_containers():
    ib = manager(keep={"outputs": infinitybatch.histories.last(1)})
    for _ in range(EPOCHS):
        ib.epochstart_()
        for inputs, targets in ib.dataloader:
            ib.batch_(inputs)
            ib.loss(targets)
            ib.backward()
            ib.step()
            ib.zero_grad()
    assert_as_native(ib)
    assert ib.outputs[EPOCHS - 1][1].shape == (8, 3)


def test_no_graph_waits_beside_the_next_one():
    ib = manager()
    seen = []
    ib.model[0].register_forward_hook(lambda *_: seen.append(outputs() is None))
    outputs = weakref.ref(X)
    ib.batch_(X[:12])
    seen.clear()
    outputs = weakref.ref(ib.batch_(X[:12]))
    seen.clear()
    ib.batch_(X[:12])
    assert seen and all(seen)


@pytest.mark.parametrize("name", ["model", "criterion", "optimizer"])
def test_properties_may_be_set_once(name):
    ib = manager()
    before = getattr(ib, name)
    with pytest.warns(InfinityBatchWarning, match=f"IB110: {name} is set already"):
        setattr(ib, name, getattr(manager(), name))
    assert getattr(ib, name) is before
    setattr(ib, name, None)
    assert getattr(ib, name) is before


def test_dataloader_backward_device_and_verbose_mode_may_be_set_later():
    ib = manager()
    ib.epoch()
    ib.dataloader = loader(20)
    ib.verbose_mode = True
    ib.verbose_mode = False
    ib.epoch()
    assert [len(epoch) for epoch in ib.losses] == [2, 1]


@pytest.mark.parametrize("name", ["forward_device", "inputs", "outputs", "targets", "losses"])
def test_read_only_properties(name):
    with pytest.raises(AttributeError):
        setattr(manager(), name, None)


def test_losses_epoch_batch_is_a_value_and_its_size():
    ib = manager()
    ib(2)
    value, size = ib.losses[1][1]
    assert isinstance(value, float) and size == 8
    ib(1)  # containers are cleared, and epochs counted from 0
    assert ib.losses.epochs == [0] and ib.losses[0][1][1] == 8
    ib.epoch()
    assert ib.losses.epochs == [0, 1]


def test_inputs_outputs_and_targets_where_they_are_asked_for():
    everything = infinitybatch.histories.everything()
    ib = manager(keep={"inputs": everything, "outputs": everything, "targets": everything})
    ib(2)
    assert torch.equal(ib.inputs[1][1], X[12:20]) and torch.equal(ib.targets[1][1], Y[12:20])
    loss = F.cross_entropy(ib.outputs[1][1], Y[12:20])
    assert abs(loss.item() - ib.losses[1][1][0]) <= 1e-12


def test_containers_do_not_grow_without_bound():
    ib = manager()
    for _ in range(50):
        ib.epoch()
    assert sum(map(len, ib.losses)) == 100
    assert not len(ib.inputs) and not len(ib.outputs) and not len(ib.targets)
    ib = manager(keep={"losses": infinitybatch.histories.last(3)})
    ib(10)
    assert sum(map(len, ib.losses)) == 3


def test_clearcontainers_():
    ib = manager()
    ib.epoch()
    ib.clearcontainers_()
    assert len(ib.losses) == 0
    ib.epoch()
    assert ib.losses.epochs == [0]


def test_changemodeldevice_and_forward_device():
    ib = manager()
    ib.epoch()
    ib.changemodeldevice("cpu")
    assert ib.forward_device == torch.device("cpu") == ib.backward_device
    ib.epoch()
    with pytest.raises(InfinityBatchError, match="not a device"):
        ib.changemodeldevice("nowhere")
    with pytest.raises(InfinityBatchError, match="ib.model = "):
        InfinityBatch().changemodeldevice("cpu")


def test_updateforwarddevice_and_a_model_that_was_moved():
    ib = InfinityBatch(nn.Linear(2, 2), verbose=False)
    ib.model.to("meta")
    assert ib.forward_device == torch.device("cpu")
    with pytest.warns(InfinityBatchWarning, match="moved from cpu to meta.*updateforwarddevice"):
        ib._look_at_device()
    assert ib.forward_device == torch.device("meta")
    ib.model.to_empty(device="cpu")
    ib.updateforwarddevice()
    assert ib.forward_device == torch.device("cpu")
    ib._look_at_device()
    ib.model.requires_grad_(False)
    with pytest.warns(InfinityBatchWarning, match="no parameter that wants a gradient"):
        ib.updateforwarddevice()


def test_checkdevices_warns_of_a_backward_device_that_saves_nothing():
    ib = manager()
    ib.checkdevices_()
    with pytest.warns(InfinityBatchWarning, match="memory_budget="):
        ib.backward_device = "cpu"
    with pytest.warns(InfinityBatchWarning):
        ib.checkdevices_()
    ib.backward_device = None
    assert ib.backward_device == ib.forward_device


def test_InfinityBatchError_is_what_everything_raises():
    assert issubclass(infinitybatch.BudgetExceeded, InfinityBatchError)
    assert issubclass(InfinityBatchError, Exception) and issubclass(InfinityBatchWarning, Warning)
    for name in ("model", "criterion", "optimizer", "dataloader"):
        full = manager()
        ib = InfinityBatch(verbose=False)
        for other in ("model", "criterion", "optimizer", "dataloader"):
            if other != name:
                setattr(ib, other, getattr(full, other))
        with pytest.raises(InfinityBatchError, match=f"has no {name} yet: ib.{name} = "):
            ib(1)


def test_a_name_that_is_misspelt_as_in_its_README():
    ib = InfinityBatch()
    with pytest.raises(AttributeError, match="has no optimier; did you mean optimizer?"):
        ib.optimier = None
    with pytest.raises(InfinityBatchError, match="micro_batch_sice= is no option"):
        InfinityBatch(micro_batch_sice=3)
    with pytest.raises(InfinityBatchError, match="torch.nn.Module, not int"):
        ib.model = 3
    with pytest.raises(InfinityBatchError, match=r"not the class Linear: Linear\(\)"):
        ib.model = nn.Linear
    with pytest.raises(InfinityBatchError, match="keep has 'gradients'; what can be kept are"):
        InfinityBatch(keep={"gradients": 3})


def test_stages_out_of_their_order():
    ib = manager()
    with pytest.warns(InfinityBatchWarning, match="no loss to run backward"):
        ib.backward()
    with pytest.raises(InfinityBatchError, match="outputs = ib.batch_"):
        ib.loss(Y[:12])


def test_the_loops_events_are_watched():
    ib = manager()
    ib.batch_(X[:12])
    with pytest.raises(InfinityBatchError, match="no gradient to step with"):
        ib.step()
    outputs = ib.batch_(X[:12])
    ib.criterion(outputs, Y[:12]).backward()
    ib.step()
    with pytest.warns(InfinityBatchWarning, match=r"add up: ib.zero_grad\(\)"):
        ib.batch_(X[:12])
    ib.optimizer.zero_grad(set_to_none=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = ib.batch_(X[:12])
        ib.criterion(outputs, Y[:12]).backward()
        outputs = ib.batch_(X[:12])  # two batches into one step
        ib.criterion(outputs, Y[:12]).backward()
        ib.step()
        ib.optimizer.zero_grad(set_to_none=False)
        ib.batch_(X[:12])


def test_eval_is_planned_there():
    ib = manager()
    ib.epoch()
    result = ib.eval(loader(), {"right": lambda o, t: (o.argmax(1) == t).double().mean()})
    model = ib.model.eval()
    assert abs(result.loss - F.cross_entropy(model(X[:20]), Y[:20]).item()) <= 1e-12
    assert 0 <= float(result.metrics["right"]) <= 1


def test_verbose_shows_progress_and_otherwise_nothing(capsys):
    manager()(2)
    assert capsys.readouterr() == ("", "")
    manager(verbose=True)(2)
    shown = capsys.readouterr()
    assert shown.out == "" and "epoch 2/2" in shown.err


class Net(nn.Module):
    """Of its example, for images of 12 by 12."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(128, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def images(size=32):
    torch.manual_seed(2)
    x, y = torch.randn(72, 1, 12, 12, dtype=torch.float64), torch.randint(10, (72,))
    return list(zip(x.split(size), y.split(size), strict=True))


def test_mnist_test_example():
    torch.manual_seed(3)
    net = Net().double()
    wanted = copy.deepcopy(net)
    optimizer = torch.optim.Adadelta(wanted.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    data = images()
    torch.manual_seed(4)
    for _ in range(2):
        for inputs, targets in data:
            optimizer.zero_grad()
            F.nll_loss(wanted(inputs), targets).backward()
            optimizer.step()
        scheduler.step()

    ib = infinitybatch.InfinityBatch(verbose=False, micro_batch_size=10, match_native_rng=True)
    ib.model = net
    ib.optimizer = torch.optim.Adadelta(ib.model.parameters(), lr=1.0)
    ib.criterion = nn.NLLLoss()
    ib.dataloader = data
    scheduler = torch.optim.lr_scheduler.StepLR(ib.optimizer, step_size=1, gamma=0.7)
    torch.manual_seed(4)
    for _ in range(2):
        ib.model.train()
        ib.epoch()
        scheduler.step()
    assert tools.compare_networks(ib.model, wanted, tolerance=1e-12)


def test_graphs_of_all_samples_are_not_kept():
    """Its failing: the peak grew with the number of samples."""
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    x, y = torch.randn(4000, 8), torch.randn(4000, 256)
    with infinitybatch.memory.peak() as whole:
        F.mse_loss(model(x), y).backward()
    model.zero_grad()
    budget = infinitybatch.memory.stats().live + 6 * 2**20
    assert whole.peak > budget
    ib = InfinityBatch(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), [(x, y)], verbose=False,
        memory_budget=budget,
    )  # fmt: skip
    with infinitybatch.memory.peak() as peak:
        ib(2)
    assert peak.peak <= budget


def test_CudaMemorySnapShot():
    if torch.cuda.is_available():
        snapshot = tools.CudaMemorySnapShot(0)
        assert snapshot.free_cache == snapshot.reserved - snapshot.allocated >= 0 < snapshot.total
    else:
        with pytest.raises(InfinityBatchError, match="MemorySnapShot"):
            tools.CudaMemorySnapShot(0)
        snapshot = tools.MemorySnapShot("cpu")
        assert 0 <= snapshot.allocated <= snapshot.reserved < snapshot.total
        assert snapshot.free_cache == snapshot.reserved - snapshot.allocated


def test_CudaHistory_is_a_list_of_named_snapshots_that_prints_itself():
    history = tools.CudaHistory()
    assert isinstance(history, list) and str(history) == "CudaHistory is empty."
    history = tools.MemoryHistory()
    history.append("start")
    assert history[0][0] == "start" and "start" in str(history)


def test_determinize():
    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    done = tools.determinize(7, be_deterministic=True)
    first = drawn()
    tools.determinize(7, True)
    assert drawn() == first
    done.undo()
    assert not torch.backends.cudnn.deterministic


def test_is_equal_network():
    one, another = network(), network()
    assert tools.is_equal_network(one, another)
    with torch.no_grad():
        another[1].bias[2] += 1e-15
    assert not tools.is_equal_network(one, another)


def test_is_equal_with_error():
    assert tools.is_equal_with_error(X, X + 1e-8) and not tools.is_equal_with_error(X, X + 1e-6)
    assert tools.is_equal_with_error(X.clone().requires_grad_(), X, True)
    assert not tools.is_equal_with_error(X, X[:3])
