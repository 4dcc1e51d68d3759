"""What no tape can see: each is noticed and named, and what would be wrong twice is refused."""

import os
import threading

import infinitybatch as ib
import numpy as np
import pytest
import torch
from tape_support import opaque, replays
from torch import nn
from torch.utils.checkpoint import checkpoint


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class TestFunctions:
    def test_python(self):
        opaque(lambda x: StraightThrough.apply(x * 2), leaf(3), reason="StraightThrough")

    def test_python_that_writes_into_its_own_tensors(self):
        class Clipped(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = x.clone()
                y[y < 0] = 0
                ctx.save_for_backward(y)
                return y

            @staticmethod
            def backward(ctx, gradient):
                return gradient * (ctx.saved_tensors[0] > 0)

        opaque(lambda x: Clipped.apply(x).add_(1), leaf(3), reason="Clipped")

    def test_python_that_writes_into_something_that_stays(self):
        seen = torch.zeros(3).double()

        class Counted(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                seen.add_(1)
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient * 2

        opaque(Counted.apply, leaf(3), reason="Counted", refusal="not a buffer")
        opaque(Counted.apply, leaf(3), reason="Counted", buffers=[seen])

    def test_gradients_inside(self):
        def penalty(x):
            y = (x.square() * 3).sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            return g.square()

        opaque(penalty, leaf(3), reason="gradients are computed")

    def test_backward_inside(self):
        w = leaf(3)

        def forward(x):
            (x * w).sum().backward()
            return x * w

        opaque(forward, double(3), reason="gradients", refusal="backward()")

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint(self, reentrant):
        w = leaf(3)
        forward = lambda x: checkpoint(lambda x: (x * w).tanh(), x, use_reentrant=reentrant)  # noqa: E731
        opaque(forward, leaf(3), reason="Checkpoint" if reentrant else "torch.utils.checkpoint")

    def test_saved_tensor_hooks(self):
        w = leaf(3)

        def forward(x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
                return x * w

        opaque(forward, double(3), reason="saved-tensor hooks")

    @pytest.mark.skipif(
        os.environ.get("INFINITYBATCH_LONG_TESTS", "0") == "0", reason="compiles for half a minute"
    )
    def test_compiled(self):
        w = leaf(3)
        compiled = torch.compile(lambda x: (x * w).sin() + x)
        opaque(compiled, double(3), reason="compiled code")  # the compiler at work
        opaque(compiled, double(3), reason="compiled code")

    def test_forward_mode(self):
        import torch.autograd.forward_ad as fwd

        w = leaf(3)

        def forward(x):
            with fwd.dual_level():
                return fwd.unpack_dual((fwd.make_dual(x, x) * w).sin()).tangent

        opaque(forward, double(3), reason="forward-mode")


class TestHooksAndFlags:
    def test_tensor_hook(self):
        w = leaf(3)

        def forward(x):
            y = x * w
            y.register_hook(lambda g: g * 2)
            return y * 3

        opaque(forward, double(3), reason="hook")

    def test_retain_grad(self):
        w = leaf(3)

        def forward(x):
            y = x * w
            y.retain_grad()
            return y * 3

        opaque(forward, double(3), reason="retain_grad")

    @pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
    def test_node_hook(self, kind):
        w = leaf(3)

        def forward(x):
            y = x * w
            getattr(y.grad_fn, kind)(lambda *g: None)
            return y * 3

        opaque(forward, double(3), reason="graph node")

    def test_hook_on_a_branch_that_leads_nowhere(self):
        w = leaf(3)

        def forward(x):
            (x * w).register_hook(lambda g: g * 2)
            return x * w

        replays(forward, double(3), wanted=[w])

    def test_module_backward_hook(self):
        layer = nn.Linear(3, 3).double()
        layer.register_full_backward_hook(lambda *_: None)
        opaque(layer, leaf(2, 3), reason="BackwardHook")

    def test_requires_grad_in_the_middle(self):
        def forward(x):
            y = x * 2
            y.requires_grad_()
            return y * 3

        opaque(forward, double(3), reason="requires_grad")

    def test_requires_grad_on_the_input(self):
        w = leaf(3)
        opaque(lambda x: x.requires_grad_() * w, double(3), reason="requires_grad")

    def test_parameter_switched_off_for_a_while(self):
        w = leaf(3)

        def forward(x):
            y = x * w
            w.requires_grad_(False)
            z = x * w
            w.requires_grad_(True)
            return y + z

        opaque(forward, double(3), reason="requires_grad")


class TestMemory:
    def test_data(self):
        w = leaf(3)

        def forward(x):
            y = x * w
            return y * y.data.abs()

        opaque(forward, double(3), reason=".data")

    def test_written_through_data(self):
        w = leaf(3)

        def forward(x):
            y = x * w
            y.data.clamp_(min=0.1)
            return y * 2

        opaque(forward, double(3), reason=".data")

    def test_numpy_round_trip(self):
        def forward(x):
            y = x * 2
            return y * torch.from_numpy(y.numpy())

        opaque(forward, double(3), reason="numpy()")

    def test_written_by_numpy(self):
        w = leaf(3)

        def forward(x):
            y = x * 2
            y.numpy()[0] = 7
            return y * w

        opaque(forward, double(3), reason="NumPy")

    def test_empty_filled_by_ops_and_numpy(self):
        w = leaf(4)

        def forward(x):
            out = torch.empty(4, dtype=torch.float64)
            out[:2] = x
            out.numpy()[2:] = 5
            return out * w

        opaque(forward, double(2), reason="NumPy")

    def test_set_data(self):
        w = leaf(3)

        def forward(x):
            y = x * 2
            y.data = torch.ones(3).double()
            return y * w

        opaque(forward, double(3), reason="exchanged")

    def test_parameter_exchanged(self):
        """The momentum encoder of MoCo, updated in forward."""
        key = nn.Parameter(torch.ones(3).double())

        def forward(x):
            key.data = key.data * 0.9
            return x * key

        _, tape = ib.tape.record(lambda x: (x * key, forward(x)), (double(3),))
        assert "exchanged" in tape.opaque and "exchanged" in tape.refusal

    def test_parameter_exchanged_after_its_last_use(self):
        key = nn.Parameter(torch.ones(3).double())

        def forward(x):
            y = x * key
            key.data = torch.zeros(3).double()
            return y

        opaque(forward, double(3), reason="exchanged", refusal="exchanged")

    def test_storage_argument(self):
        def forward(x):
            y = x * 2
            z = torch.empty(0, dtype=torch.float64)
            z.set_(y.untyped_storage(), 0, (3,))
            return z + 1

        opaque(forward, double(3), reason="no tape can keep")

    def test_views_of_one_parameter_written(self):
        flat = torch.zeros(6).double()
        a, b = flat[:3], flat[3:]

        def forward(x):
            y = x * a + b
            a.add_(1)
            return y

        opaque(forward, double(3), reason="two tensors share", refusal="not a buffer")


class TestState:
    def test_attribute_written(self):
        steps = torch.zeros(()).double()

        def forward(x):
            steps.add_(1)
            return x * steps

        _, tape = ib.tape.record(forward, (double(3),))
        assert tape.opaque is None and "not a buffer" in tape.refusal
        _, tape = ib.tape.record(forward, (double(3),), buffers=[steps])
        assert tape.opaque is None and tape.refusal is None

    def test_attribute_written_through_a_view(self):
        table = torch.zeros(4, 3).double()

        def forward(x):
            table[1] = x
            return table.sum() * x

        _, tape = ib.tape.record(forward, (double(3),))
        assert "not a buffer" in tape.refusal
        replays(forward, double(3), buffers=[table])

    def test_scratch_from_numpy_written(self):
        def forward(x):
            scratch = torch.from_numpy(np.ones(3))
            return x * scratch.add_(1)

        replays(forward, double(3))

    def test_parameter_written(self):
        w = leaf(3)

        def forward(x):
            with torch.no_grad():
                w.clamp_(-1, 1)
            return x * w

        _, tape = ib.tape.record(forward, (double(3),))
        assert "parameter" in tape.refusal

    def test_parameter_written_through_data(self):
        w = leaf(3)

        def forward(x):
            w.data.clamp_(-1, 1)
            return x * w

        _, tape = ib.tape.record(forward, (double(3),))
        assert tape.refusal

    def test_input_written_before_something_opaque(self):
        w = leaf(3)

        def forward(x):
            x.add_(1)
            return StraightThrough.apply(x * w)

        opaque(forward, double(3), reason="StraightThrough", refusal="inputs")


class TestWrappers:
    def test_vmap(self):
        w = leaf(3)
        forward = lambda x: torch.func.vmap(lambda row: (row * w).sum())(x)  # noqa: E731
        opaque(forward, double(4, 3), reason="functorch")

    def test_functional_gradient(self):
        forward = lambda x: torch.func.grad(lambda x: x.pow(3).sum())(x)  # noqa: E731
        opaque(forward, double(3), reason="functorch")

    def test_functional_call(self):
        layer = nn.Linear(3, 3).double()
        weights = {name: leaf(*p.shape) for name, p in layer.named_parameters()}
        forward = lambda x: torch.func.functional_call(layer, weights, (x,))  # noqa: E731
        replays(forward, double(2, 3), wanted=list(weights.values()))

    def test_subclass(self):
        class Wrapped(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

            def __init__(self, inner):
                self.inner = inner

            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                bare = lambda t: t.inner if isinstance(t, Wrapped) else t  # noqa: E731
                return function(*map(bare, args), **(kwargs or {}))

        opaque(lambda x: x + Wrapped(torch.ones(3).double()), double(3), reason="subclass")
        opaque(lambda x: x * 2, Wrapped(torch.ones(3).double()), reason="subclass")

    def test_plain_subclass(self):
        """Without a dispatch of its own it is a tensor like any other."""

        class Named(torch.Tensor):
            pass

        w = leaf(3)
        replays(lambda x: x * w.as_subclass(Named), double(3), wanted=[w])

    def test_dispatch_mode(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                return function(*args, **(kwargs or {}))

        def forward(x):
            with Mode():
                return x * 2

        opaque(forward, double(3), reason="dispatch mode")

    def test_nested_jagged(self):
        def forward(x):
            rows = torch.nested.nested_tensor([x, x], layout=torch.jagged)
            return (rows * 2).values()

        _, tape = ib.tape.record(forward, (double(3),))
        assert tape.opaque


class TestElsewhere:
    def test_other_threads(self):
        """As DataParallel's replicas: the recording sees its own thread alone."""
        w = leaf(3)

        def forward(x):
            results = []
            worker = threading.Thread(target=lambda: results.append((x * w).tanh()))
            worker.start()
            worker.join()
            return results[0] * 2

        opaque(forward, double(3), reason="history of its own")

    def test_other_threads_write(self):
        w = leaf(3)

        def forward(x):
            y = x * 2
            worker = threading.Thread(target=lambda: y.add_(1))
            worker.start()
            worker.join()
            return y * w

        opaque(forward, double(3), reason="written outside")

    def test_history_from_before(self):
        w = leaf(3)
        doubled = w * 2
        opaque(lambda x: x * doubled, double(3), reason="history of its own")

    def test_recording_inside_a_recording(self):
        w, tapes = leaf(3), []

        def forward(x):
            y, tape = ib.tape.record(lambda x: (x * w).tanh(), (x,))
            tapes.append(tape)
            return y + tape.replay(x)

        replays(forward, double(3), wanted=[w])
        assert tapes[0].opaque is None and len(tapes[0]) == 2

    def test_an_op_that_fails_after_it_may_have_written(self):
        def forward(x):
            y = x * 2
            with pytest.raises(RuntimeError):
                y.add_(torch.ones(7).double())
            return y

        opaque(forward, double(3), reason="failed")

    def test_foreach_that_fails_after_it_may_have_written(self):
        def forward(x):
            y, z = x * 2, x * 3
            with pytest.raises(RuntimeError):
                torch._foreach_add_([y, z], [torch.ones(3).double(), torch.ones(7).double()])
            return y

        opaque(forward, double(3), reason="failed")

    def test_replay_says_why_not(self):
        _, tape = ib.tape.record(lambda x: StraightThrough.apply(x), (leaf(3),))
        with pytest.raises(ib.Unsupported, match="StraightThrough"):
            tape.replay(leaf(3))
