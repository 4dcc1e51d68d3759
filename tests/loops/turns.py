import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

from .loop import Training, Turn, by_head, classify, features, labels, linear, loop, regress


def small() -> nn.Sequential:
    return nn.Sequential(linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), linear(8))


@loop
def two_steps_of_sharpness_aware_minimisation() -> Training:
    """SAM: a step uphill, the gradient there, the step downhill from where it began."""

    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        parameters = list(turn.model.parameters())
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        uphill = [0.05 * p.grad / norm for p in parameters]
        torch._foreach_add_([p.data for p in parameters], uphill)
        turn.optimizer.zero_grad()
        turn.backward()
        torch._foreach_sub_([p.data for p in parameters], uphill)
        turn.optimizer.step()

    training = classify(small())
    training.turn = turn
    return training


@loop
def gradients_accumulated_over_two_backwards() -> Training:
    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        turn.backward()
        turn.optimizer.step()

    training = classify(small())
    training.turn = turn
    return training


@loop
def gradients_clipped_and_noise_added() -> Training:
    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        nn.utils.clip_grad_norm_(turn.model.parameters(), 0.1)
        for parameter in turn.model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape), alpha=1e-3)
        turn.optimizer.step()

    training = classify(small())
    training.turn = turn
    return training


@loop
def optimizers_that_step_in_hooks() -> Training:
    """Each parameter is moved as soon as its gradient is there, which is then let go of."""
    model = nn.Sequential(linear(6, 8), nn.Tanh(), linear(8))
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.05)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    training = classify(model)
    training.turn = lambda turn: turn.backward()
    return training


@loop
def lookahead_of_every_second_turn() -> Training:
    """Slow weights are mixed in by the loop; a counter and copies live on the model."""

    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        turn.optimizer.step()
        turn.model.turns += 1
        if turn.model.turns % 2 == 0:
            for slow, fast in zip(turn.model.slow, turn.model.parameters(), strict=True):
                slow.lerp_(fast.data, 0.5)
                fast.data.copy_(slow)

    model = small()
    model.slow = [parameter.detach().clone() for parameter in model.parameters()]
    model.turns = 0
    training = classify(model)
    training.turn = turn
    return training


@loop
def layers_unfrozen_from_turn_to_turn() -> Training:
    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        turn.optimizer.step()
        turn.model[0].requires_grad_(not turn.model[0].weight.requires_grad)

    training = classify(small())
    training.model[0].requires_grad_(False)
    training.turn = turn
    return training


@loop
def evaluation_between_turns() -> Training:
    """After each step the model is called without gradients, in eval mode and in train mode."""

    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        turn.optimizer.step()
        rows = torch.linspace(-1, 1, 24).view(4, 6)
        with torch.no_grad():
            turn.model.eval()(rows)
            turn.model.train()(rows)

    training = classify(small())
    training.turn = turn
    return training


@loop
def layer_added_while_training() -> Training:
    """Progressive growing: after a turn the model has a layer more, which the optimizer gets."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        turn.optimizer.step()
        layer = linear(6, 6)
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
        turn.model.layers.append(layer)
        turn.optimizer.add_param_group({"params": layer.parameters()})
        torch.manual_seed(5)

    training = regress(by_head(forward, layers=nn.ModuleList([linear(6, 6)])))
    training.turn = turn
    return training


@loop
def loss_switched_by_a_flag_of_the_model() -> Training:
    """Warm-up: the first turn trains by another branch of forward."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.warm(x) if self.warming else self.head(x)

    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        turn.optimizer.step()
        turn.model.warming = False

    model = by_head(forward, warm=linear())
    model.warming = True
    return Training(model, F.cross_entropy, (features(),), (labels(),), turn=turn)


@loop
def setting_in_a_list_that_the_loop_changes() -> Training:
    """A temperature in a mutable configuration, lowered from turn to turn."""
    model = by_head(lambda self, x: self.head(x) / self.settings["schedule"][0])

    def turn(turn: Turn) -> None:
        turn.optimizer.zero_grad()
        turn.backward()
        turn.optimizer.step()
        turn.model.settings["schedule"][0] *= 0.5

    model.settings = {"schedule": [2.0]}
    training = regress(model)
    training.turn = turn
    return training
