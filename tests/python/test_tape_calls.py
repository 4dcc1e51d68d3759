"""Tapes of every kind of argument, and of callers that are not the main thread's forward."""

import threading

import infinitybatch as ib
import pytest
import torch
from tape_support import leaf, replays, same_bits
from torch import nn
from torch.nn import functional as F  # noqa: N812


class TestArguments:
    def test_foreach(self):
        a, b = leaf(3), leaf(2)

        def forward(x):
            sums = torch._foreach_mul([a, b], 2.0)
            torch._foreach_add_(sums, 1.0)
            return torch._foreach_norm(sums), x * sums[0]

        replays(forward, torch.randn(3).double(), wanted=[a, b])

    def test_index_with_none(self):
        w, rows = leaf(4, 5, 3), torch.tensor([0, 2])

        def forward(x):
            y = w[:, rows, :] + w[..., [1, 0, 1]][:, :2] * 2
            y[:, rows[:1]] = 7.0
            return y[:, torch.tensor([True, False])] * x

        replays(forward, torch.randn(3).double(), wanted=[w])

    def test_lists(self):
        w = leaf(3)

        def forward(x):
            parts = [x * w, x[:1] + w, *torch.split(x * w, [1, 3])]
            rows = torch.cat(parts)
            return torch.stack([rows, rows]), torch.einsum("ij,ik,j->k", rows, rows, w)

        replays(forward, torch.randn(4, 3).double(), wanted=[w])

    def test_recurrent(self):
        for layer in (nn.LSTM(3, 4, 2, dropout=0.3), nn.GRU(3, 4, bidirectional=True)):
            layer.double()
            replays(layer, torch.randn(6, 2, 3).double(), wanted=list(layer.parameters()))

    def test_packed_sequence(self):
        layer = nn.LSTM(3, 4).double()

        def forward(x):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
            return nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0]

        replays(forward, torch.randn(5, 2, 3).double(), wanted=list(layer.parameters()))

    def test_sparse(self):
        w = leaf(3, 3)
        forward = lambda x: torch.sparse.mm((x * w).to_sparse(), w) * 2  # noqa: E731
        replays(forward, torch.randn(3, 3).double().relu(), wanted=[w])

    def test_sparse_embedding(self):
        w = leaf(5, 3)
        replays(lambda i: F.embedding(i, w, sparse=True), torch.tensor([1, 2, 1]), wanted=[w])

    def test_complex(self):
        w = leaf(4)
        forward = lambda x: torch.fft.irfft(torch.fft.rfft(x * w).conj() * 1j)  # noqa: E731
        replays(forward, torch.randn(4).double(), wanted=[w])

    def test_transformer(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        replays(layer, torch.randn(3, 5, 8), wanted=list(layer.parameters()))
        layer.eval()
        with torch.no_grad():
            replays(layer, torch.randn(3, 5, 8))


class TestCallers:
    def test_op_that_fails_and_is_caught(self):
        w = leaf(3)

        def forward(x):
            for wrong in (
                lambda: x @ w[:2],
                lambda: x.view(7),
                lambda: torch.cat([x, w[None, None]]),
            ):
                with pytest.raises(RuntimeError):
                    wrong()
            return x * w

        replays(forward, torch.randn(3).double(), wanted=[w])

    def test_profiler_ranges(self):
        w = leaf(3)

        def forward(x):
            with torch.profiler.record_function("part"):
                return x * w

        replays(forward, torch.randn(3).double(), wanted=[w])

    def test_torch_function_mode(self):
        w = leaf(3)

        def forward(x):
            with torch.device("cpu"):
                return x * w * torch.ones(3)

        replays(forward, torch.randn(3).double(), wanted=[w])

    def test_script(self):
        @torch.jit.script
        def scripted(x, w):
            y = torch.tanh(x * w)
            for _ in range(3):
                y = y * 2 + torch.sigmoid(y) * x
            return y

        w = leaf(3)
        for _ in range(4):  # the profiling executor changes what it runs
            x = torch.randn(3).double()
            outputs, tape = ib.tape.record(lambda x: scripted(x, w), (x,))
            if tape.opaque is None:
                again = tape.replay(x)
                assert same_bits(again, outputs)
                assert same_bits(*(torch.autograd.grad(o.sum(), w)[0] for o in (again, outputs)))
            else:
                assert "graph node" in tape.opaque, tape.opaque

    def test_python_error_ends_the_recording(self):
        def forward(x):
            raise KeyError("mine")

        with pytest.raises(KeyError):
            ib.tape.record(forward, (torch.ones(3),))
        replays(lambda x: x * 2, torch.ones(3))

    def test_threads_record_for_themselves(self):
        failures = []

        def work(scale):
            try:
                w = torch.full((3,), float(scale), requires_grad=True)
                for _ in range(20):
                    replays(lambda x: (x * w).tanh(), torch.ones(3), wanted=[w])
            except BaseException as failure:  # noqa: BLE001
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
