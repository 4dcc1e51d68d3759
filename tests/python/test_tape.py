"""What a tape replays: everything that goes through the dispatcher, bit for bit."""

import ctypes

import infinitybatch as ib
import numpy as np
import pytest
import torch
from tape_support import leaf, opaque, replays, same_bits
from torch import nn
from torch.nn import functional as F  # noqa: N812


def test_plain():
    w = leaf(5, 3)
    tape = replays(lambda x: (x @ w).relu().sum(1), torch.randn(4, 5).double(), wanted=[w])
    assert str(tape).splitlines()[0].endswith("aten::matmul(%0, %1)")


def test_ops_that_nothing_needs_are_left_out():
    w = leaf(3)

    def forward(x):
        (x * w).exp().sum()  # nobody looks
        return x + w

    assert len(replays(forward, torch.randn(3).double(), wanted=[w])) == 1


class TestModes:
    def test_teacher_under_no_grad(self):
        w, teacher = leaf(3, 3), leaf(3, 3)

        def forward(x):
            with torch.no_grad():
                target = (x @ teacher).tanh()
            return (x @ w - target).square() * (x @ teacher)

        tape = replays(forward, torch.randn(4, 3).double(), wanted=[w, teacher])
        assert len(tape) == 7

    def test_inference_mode(self):
        w = leaf(3)

        def forward(x):
            with torch.inference_mode():
                scale = (w * x).abs().sum()
            return x * w, scale + 0

        replays(forward, torch.randn(3).double(), wanted=[w])

    def test_all_of_it_under_no_grad(self):
        w = leaf(3)
        with torch.no_grad():
            replays(lambda x: x * w, torch.randn(3).double(), wanted=[w])

    def test_enable_grad_inside(self):
        w = leaf(3)

        def forward(x):
            with torch.enable_grad():
                return x * w

        with torch.no_grad():
            _, tape = ib.tape.record(forward, (torch.ones(3).double(),))
        assert tape.replay(torch.ones(3).double()).requires_grad

    def test_autocast_in_the_middle(self):
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(x):
            with torch.autocast("cpu", torch.bfloat16):
                x = first(x)
                with torch.autocast("cpu", enabled=False):
                    x = second(x.float())
                x = second(first(x))
            x = first(x.float())
            with torch.autocast("cpu", torch.float16):
                return first(x)

        parameters = [*first.parameters(), *second.parameters()]
        replays(forward, torch.randn(4, 8), wanted=parameters)

    def test_autocast_around(self):
        layer = nn.Linear(8, 8)
        with torch.autocast("cpu", torch.bfloat16):
            outputs, tape = ib.tape.record(lambda x: layer(layer(x)), (torch.ones(2, 8),))
        torch.clear_autocast_cache()
        again = tape.replay(torch.ones(2, 8))
        assert same_bits(outputs, again) and again.dtype == torch.bfloat16
        with torch.no_grad():
            layer.bias.add_(1)
        with pytest.raises(ib.StateError):
            tape.replay(torch.ones(2, 8))

    def test_autocast_regions_that_share_a_weight(self):
        """Each region casts the weight anew, so its gradient is summed in full precision."""
        layer = nn.Linear(16, 16, bias=False)

        def forward(x):
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    x = layer(x)
                x = x.float() * 1.7
            return x

        replays(forward, torch.randn(64, 16), wanted=[layer.weight])

    def test_autocast_regions_back_to_back(self):
        layer = nn.Linear(16, 16, bias=False)

        def forward(x):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    x = layer(x)
            return x

        opaque(forward, torch.randn(64, 16), reason="autocast")

    def test_attention_kernel(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q = leaf(2, 4, 16, 8, dtype=torch.float32)

        def forward(x):
            with sdpa_kernel(SDPBackend.MATH):
                a = F.scaled_dot_product_attention(q, x, x)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(a, x, q)

        x = torch.randn(2, 4, 16, 8)

        def by(backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, x, x)

        assert not same_bits(by(SDPBackend.MATH), by(SDPBackend.FLASH_ATTENTION)), "no test"
        replays(forward, x, wanted=[q])
        assert torch.backends.cuda.math_sdp_enabled()

    def test_default_type(self):
        w = leaf(3)

        def forward(x):
            torch.set_default_dtype(torch.float64)
            scale = torch.ones(3) / 3
            torch.set_default_dtype(torch.float32)
            return x * w * scale + torch.arange(3) / 7

        replays(forward, torch.randn(3).double(), wanted=[w])
        assert torch.get_default_dtype() == torch.float32

    def test_deterministic_algorithms_in_the_middle(self):
        w = leaf(3)

        def forward(x):
            torch.use_deterministic_algorithms(True)
            y = torch.empty(3, dtype=torch.float64)  # filled with NaN in this mode
            torch.use_deterministic_algorithms(False)
            return x * w, y

        replays(forward, torch.randn(3).double(), wanted=[w])
        assert not torch.are_deterministic_algorithms_enabled()


class TestConstants:
    def test_torch_tensor(self):
        w = leaf(2)

        def forward(x):
            return x * torch.tensor([1.0, 2.0], dtype=torch.float64) * w

        tape = replays(forward, torch.randn(2).double(), wanted=[w])
        assert tape.host_read

    def test_written_by_numpy(self):
        w = leaf(4)

        def forward(x):
            mask = torch.empty(4, dtype=torch.float64)
            mask.numpy()[:] = [1, 0, 1, 0]
            y = x * w * mask
            mask.numpy()[:] = 3
            return y + mask

        replays(forward, torch.randn(4).double(), wanted=[w])

    def test_read_twice_is_kept_once(self):
        w = leaf(4)

        def forward(x):
            constant = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
            for _ in range(5):
                x = x * constant
            return x * w

        tape = replays(forward, torch.randn(4).double(), wanted=[w])
        assert str(tape).count("restore") <= 2

    def test_from_numpy(self):
        w = leaf(3)
        forward = lambda x: x * torch.from_numpy(np.arange(3.0)) * w  # noqa: E731
        replays(forward, torch.randn(3).double(), wanted=[w])

    def test_empty_filled_by_ops(self):
        w = leaf(3)

        def forward(x):
            out = torch.empty(4, 3, dtype=torch.float64)
            out[:2] = x * w
            out[2:] = w
            return out * 2

        tape = replays(forward, torch.randn(2, 3).double(), wanted=[w])
        assert tape.host_read is None

    def test_values_read_by_the_host(self):
        w = leaf(3)

        def forward(x):
            y = x * w
            if y.sum() > 0:
                y = y * y.max().item()
            rows = (y > 0).nonzero()
            return y[rows[:, 0]].sum() + len(rows) * w

        tape = replays(forward, torch.randn(5, 3).double(), wanted=[w])
        assert "aten::" in tape.host_read

    def test_computed_by_numpy(self):
        w = leaf(3)

        def forward(x):
            y = x * w
            return y * torch.from_numpy(np.tanh(y.detach().clone().numpy()))

        replays(forward, torch.randn(3).double(), wanted=[w])


class TestRandomness:
    @pytest.mark.parametrize(
        "draw",
        [
            lambda x: F.dropout(x, 0.3),
            lambda x: F.alpha_dropout(x, 0.3, training=True),
            lambda x: F.rrelu(x, training=True),
            lambda x: x * torch.rand(4, 3) + torch.randn(4, 3) + torch.randn(3),
            lambda x: x * torch.randperm(3),
            lambda x: x + torch.multinomial(torch.ones(3), 2).sum(),
            lambda x: x * torch.empty(4, 3).uniform_().bernoulli_(0.5),
            lambda x: F.gumbel_softmax(x),
            lambda x: torch.normal(x, 1.0) + torch.poisson(torch.ones(4, 3)),
            lambda x: x * torch.empty(3).exponential_() + torch.randint(9, (3,)),
            lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
            lambda x: torch.distributions.Gamma(x.abs() + 1, torch.tensor(2.0)).rsample(),
        ],
    )
    def test_draws(self, draw):
        w = leaf(3, dtype=torch.float32)
        replays(lambda x: draw(x * w) * 2, torch.randn(4, 3), wanted=[w])

    def test_a_generator_of_the_user(self):
        generator = torch.Generator().manual_seed(3)
        w = leaf(3)

        def forward(x):
            y = x * torch.rand(3, generator=generator) + torch.rand(3)
            return w * y * torch.rand(3, generator=generator)

        replays(forward, torch.randn(3).double(), wanted=[w])
        state = generator.get_state()
        _, tape = ib.tape.record(forward, (torch.ones(3).double(),))
        after = generator.get_state()
        tape.replay(torch.ones(3).double())
        assert torch.equal(after, generator.get_state()) and not torch.equal(after, state)

    def test_seeded_in_the_middle(self):
        w = leaf(3)

        def forward(x):
            x = F.dropout(x * w)
            torch.manual_seed(5)
            noise = torch.rand(3)
            with torch.random.fork_rng():
                torch.manual_seed(6)
                x = F.dropout(x)
            return x * noise * torch.rand(3)

        replays(forward, torch.randn(4, 3).double(), wanted=[w])

    def test_python_and_numpy(self):
        import random

        w, rng = leaf(3), np.random.default_rng(0)

        def forward(x):
            x = x * random.random() * np.random.rand() * rng.random()
            return x * w if random.random() < 0.5 else x + w

        for _ in range(4):
            replays(forward, torch.randn(3).double(), wanted=[w])


class TestMemory:
    def test_writes_through_views(self):
        """Linear attention of RWKV, masks of Longformer: writes into views of a later read."""
        w = leaf(4, 3)

        def forward(x):
            state = torch.zeros(4, 3, dtype=torch.float64)
            out = torch.zeros(4, 3, dtype=torch.float64)
            for i in range(4):
                state[i] = x[i] * w[i]
                out[i] += state[: i + 1].sum(0)
                view = out[i]
                view *= 2
            chunks = out.unfold(0, 2, 1)
            chunks[0].masked_fill_(torch.ones(3, 2).bool().tril(), 0.5)
            return out, chunks, state

        replays(forward, torch.randn(4, 3).double(), wanted=[w])

    def test_input_written(self):
        w, x = leaf(3), torch.randn(3).double()

        def forward(x):
            x.mul_(2)
            x[0] = 5
            return x * w

        before = x.clone()
        outputs, tape = ib.tape.record(forward, (x,))
        assert tape.opaque is None and tape.refusal is None
        after = x.clone()
        assert not torch.equal(before, after)
        assert same_bits(tape.replay(x), outputs)
        assert torch.equal(x, after), "a replay writes into the inputs"

    def test_out_variants(self):
        a = torch.randn(4, 3).double()

        def forward(x):
            out = torch.empty(4, 3, dtype=torch.float64)
            torch.mul(x, a, out=out)
            values, indices = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.long)
            torch.max(x, 1, out=(values, indices))
            grown = torch.empty(0, dtype=torch.float64)
            torch.cat([out, x], out=grown)
            return out, values, indices, grown

        replays(forward, torch.randn(4, 3).double())

    def test_resized(self):
        w = leaf(4)

        def forward(x):
            base = x.new_zeros(2)
            base.resize_(4).copy_(x)
            return base * w

        replays(forward, torch.randn(4).double(), wanted=[w])

    def test_relu_in_place_between_layers(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
        replays(model, torch.randn(5, 3).double(), wanted=list(model.parameters()))

    def test_detach_in_place_and_requires_grad_in_order(self):
        w = leaf(3)

        def forward(x):
            y = (x * w).detach_()
            return y * w, (x * w).detach() + w

        replays(forward, torch.randn(3).double(), wanted=[w])


class TestBuffers:
    def test_batch_norm(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        buffers = list(model.buffers())
        replays(model, torch.randn(5, 3).double(), wanted=list(model.parameters()), buffers=buffers)
        assert int(model[1].num_batches_tracked) == 1, "a replay wrote into a buffer"
        once = [b.clone() for b in buffers]
        _, tape = ib.tape.record(model, (torch.randn(5, 3).double(),), buffers=buffers)
        assert not torch.equal(once[0], buffers[0])
        assert tape.refusal is None and tape.opaque is None

    def test_spectral_norm(self):
        model = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)).double()
        x = torch.randn(5, 3).double()
        replays(model, x, wanted=list(model.parameters()), buffers=list(model.buffers()))

    def test_spectral_norm_by_hook(self):
        model = nn.utils.spectral_norm(nn.Linear(3, 4)).double()
        x = torch.randn(5, 3).double()
        replays(model, x, wanted=list(model.parameters()), buffers=list(model.buffers()))

    def test_weight_norm(self):
        model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)).double()
        replays(model, torch.randn(5, 3).double(), wanted=list(model.parameters()))

    def test_parameter_changed_since(self):
        w = leaf(3)
        optimizer = torch.optim.SGD([w], 0.1)
        outputs, tape = ib.tape.record(lambda x: x * w, (torch.ones(3).double(),))
        outputs.sum().backward()
        tape.replay(torch.ones(3).double())
        optimizer.step()
        with pytest.raises(ib.StateError, match="changed in place since"):
            tape.replay(torch.ones(3).double())


class TestOutputs:
    def test_of_every_kind(self):
        w, constant, x = leaf(3), torch.ones(3).double(), torch.randn(3).double()

        def forward(x):
            y = x * w
            return {
                "input": x,
                "parameter": w,
                "constant": constant,
                "twice": [y, y],
                "views": (y[:2], y[1:], y.view(3, 1)),
                "object": {3, 4},
                "nothing": None,
                "number": 2.5,
                "fresh": torch.tensor([1.0, 2.0]),
            }

        outputs, tape = ib.tape.record(forward, (x,))
        assert tape.opaque is None, tape.opaque
        again = tape.replay(x)
        assert again["parameter"] is w and again["constant"] is constant
        assert again["twice"][0] is again["twice"][1]
        assert again["views"][0]._base is again["twice"][0]
        replays(forward, x, wanted=[w])

    def test_input_returned(self):
        x = torch.randn(3).double()
        _, tape = ib.tape.record(lambda x: x, (x,))
        assert tape.replay(x) is x

    def test_input_that_requires_grad(self):
        w = leaf(3)
        replays(lambda x: x * w, leaf(3), wanted=[w])

    def test_one_tensor_as_two_inputs(self):
        w, x = leaf(3), leaf(3)
        replays(lambda a, b: a * w + b, x, x, wanted=[w])

    def test_nested_inputs(self):
        w = leaf(3)
        x = {"a": torch.randn(3).double(), "b": [torch.randn(3).double(), 4]}
        replays(lambda x: x["a"] * w + x["b"][0] * x["b"][1], x, wanted=[w])


def test_equal_programs_take_the_memory_of_one():
    """Beside the tensors: what malloc has between the two passes."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("no glibc")
    numbers = [(name, ctypes.c_size_t) for name in ("", "", "", "", "mapped", "", "", "used")]
    numbers = [(name or f"other{i}", kind) for i, (name, kind) in enumerate(numbers)]
    info = type(
        "Info", (ctypes.Structure,), {"_fields_": [*numbers, ("last", 2 * ctypes.c_size_t)]}
    )
    libc.mallinfo2.restype = info

    def beside_tensors():
        now = libc.mallinfo2()
        return now.used + now.mapped - ib.memory.stats().live

    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh()) for _ in range(20)]
    wrapped = ib.wrap(nn.Sequential(*layers), micro_batch_size=1)
    taken = {}
    for samples in (16, 16, 144, 144):
        before = beside_tensors()
        loss = wrapped(torch.randn(samples, 4)).logsumexp(0).sum()
        taken[samples] = beside_tensors() - before
        loss.backward()
        del loss
    # Each has its own: a state of the random generator, its output.
    assert (taken[144] - taken[16]) / 128 < 6000
