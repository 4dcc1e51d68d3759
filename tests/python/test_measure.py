"""The measure of all tests: whatever is wrong is infinitely far, wherever it stands."""

import ast
import copy
import math
from pathlib import Path

import pytest
import torch
from measure import apart, errors, excess, gradients, numbered, worst
from torch import nn

NAN, INF = math.nan, math.inf


def right() -> dict[str, torch.Tensor | None]:
    """Five gradients and buffers, one of them none."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    return {
        "first": draw(3, 2),
        "unused": None,
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "limits": torch.tensor([1.0, -INF, NAN], dtype=torch.float64),
        "last": draw(4),
    }


def poisoned(change: str) -> dict[str, torch.Tensor | None]:
    values = right()
    if change == "NaN in a later parameter":
        values["last"][2] = NAN
    elif change == "an integer buffer":
        values["steps"] += 1
    elif change == "a mask":
        values["mask"] = ~values["mask"]
    elif change == "none in place of a gradient":
        values["last"] = None
    elif change == "zeros in place of none":
        values["unused"] = torch.zeros(3)
    elif change == "another shape that broadcasts":
        values["last"] = values["last"].reshape(4, 1)
    elif change == "another type":
        values["last"] = values["last"].float()
    elif change == "a name that is missing":
        del values["last"]
    elif change == "a name too much":
        values["more"] = torch.zeros(1)
    elif change == "infinity of the other sign":
        values["limits"][1] = INF
    elif change == "infinity in another place":
        values["limits"][0], values["limits"][1] = -INF, 1.0
    elif change == "NaN for infinity":
        values["limits"][1] = NAN
    elif change == "a number for NaN":
        values["limits"][2] = 0.0
    return values


POISONS = [
    "NaN in a later parameter",
    "an integer buffer",
    "a mask",
    "none in place of a gradient",
    "zeros in place of none",
    "another shape that broadcasts",
    "another type",
    "a name that is missing",
    "a name too much",
    "infinity of the other sign",
    "infinity in another place",
    "NaN for infinity",
    "a number for NaN",
]


def test_what_is_right_is_right():
    assert worst(right(), right()) == 0
    assert excess(right(), right()) == {}
    assert worst({}, {}) == 0


@pytest.mark.parametrize("change", POISONS)
def test_what_is_wrong_is_infinitely_far(change):
    found = poisoned(change)
    assert worst(found, right()) == INF
    assert list(excess(found, right()).values()) == [(INF, 1e-12 if change != POISONS[8] else 0.0)]


@pytest.mark.parametrize("change", POISONS)
def test_what_native_itself_spoils_gives_no_room(change):
    """Reversed batches that are NaN, say, do not allow everything."""
    assert excess(poisoned(change), right(), moved=[poisoned(change)])


def test_a_small_gradient_that_is_wrong_is_seen():
    one = torch.ones(3, dtype=torch.float64)
    wanted = {"large": one, "small": 1e-9 * one}
    assert errors({"large": one, "small": 1e-9 * one * (1 + 1e-6)}, wanted)[
        "small"
    ] == pytest.approx(1e-6, rel=1e-3)


def test_true_zeros_are_measured_by_the_largest_norm():
    one = torch.ones(3, dtype=torch.float64)
    wanted = {"large": one, "zero": 1e-17 * one}
    assert errors({"large": one, "zero": 3e-17 * one}, wanted)["zero"] == pytest.approx(2e-17)


def test_all_zeros_leave_room_for_nothing():
    zero = {"zero": torch.zeros(3)}
    assert worst(zero, zero) == 0
    assert worst({"zero": torch.full((3,), 1e-30)}, zero) == INF


def test_what_reversing_moves_gives_room_by_parameter():
    one = torch.ones(4, dtype=torch.float64)
    wanted = {"noisy": one, "quiet": one}
    moved = {"noisy": one * (1 + 1e-6), "quiet": one}
    found = {"noisy": one * (1 + 5e-6), "quiet": one * (1 + 5e-6)}
    assert list(excess(found, wanted, [moved])) == ["quiet"]


def test_sparse_and_complex_and_half_precision():
    sparse = torch.eye(3, dtype=torch.float64).to_sparse()
    assert apart(sparse, sparse) == 0
    assert apart(2 * sparse, sparse) == pytest.approx(3**0.5)
    turned = torch.tensor([1.0 + 1.0j])
    assert apart(turned, turned.conj()) == pytest.approx(2.0)
    large = torch.full((4,), 60000.0, dtype=torch.float16)
    assert worst({"half": -large}, {"half": large}) == pytest.approx(2.0)  # no overflow on the way
    assert worst({"a": large}, {"a": large.double()}) == INF
    assert worst({"a": large}, {"a": large.double()}, any_type=True) == 0


def test_a_model_whose_second_parameter_is_poisoned():
    """The old measures took max() of numbers in order, which keeps the first where one is NaN."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model(torch.randn(5, 2)).sum().backward()
    wanted = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model[1].bias.grad.fill_(NAN)
    assert max(float((gradients(model)[n] - wanted[n]).norm()) for n in wanted) == 0  # as it was
    assert worst(gradients(model), wanted) == INF


def test_results_of_a_step_are_held_to_it():
    """`worst_error`, on what native leaves: gradients and buffers of every type, and the loss."""
    from support import Calls, Result, native, worst_error

    model = Calls(
        lambda self, x: self.net(x),
        net=nn.Linear(2, 3).double(),
        spare=nn.Linear(2, 2),
        steps=torch.tensor(3),
    )
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randint(3, (5,))
    wanted = native(model, nn.CrossEntropyLoss(), x, y)

    def changed(**parts: object) -> float:
        values = {"loss": wanted.loss, "gradients": wanted.gradients, "buffers": wanted.buffers}
        return worst_error(Result(**copy.deepcopy(values | parts), model=model), wanted)

    assert changed() == 0
    nan = torch.full((3,), NAN, dtype=torch.float64)
    assert changed(gradients=wanted.gradients | {"net.bias": nan}) == INF
    assert changed(gradients=wanted.gradients | {"spare.bias": torch.zeros(2)}) == INF
    assert changed(gradients=dict(list(wanted.gradients.items())[1:])) == INF
    assert changed(buffers={"steps": torch.tensor(4)}) == INF
    assert changed(buffers={}) == INF
    assert changed(loss=wanted.loss * NAN) == INF
    assert worst(numbered([nan]), numbered([nan])) == 0


def test_no_test_compares_at_torchs_own_tolerances() -> None:
    """They allow 1e-7 and more, absolute: small gradients then pass whatever they are."""
    without = []
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = {keyword.arg for keyword in node.keywords}
            if name in ("assert_close", "allclose") and not (
                {"rtol", "atol"} <= given or None in given
            ):
                without.append(f"{path.name}:{node.lineno}")
    assert not without, f"say how far apart, or use measure.assert_within: {without}"
