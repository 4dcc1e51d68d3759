"""Statistics, limits and injected failures."""

import pathlib
import re

import infinitybatch as ib
import pytest
import torch


def test_stats_count_tensors():
    before = ib.memory.stats()
    tensor = torch.zeros(1000, dtype=torch.float64)
    now = ib.memory.stats("cpu")
    assert now.live - before.live >= 8000
    assert now.peak >= now.live <= now.reserved and now.limit is None
    assert now.total > 2**28
    del tensor
    assert ib.memory.stats(torch.device("cpu")).live == before.live
    assert repr(now).startswith("Statistics(live=")


def test_empty_cache_gives_free_pages_back():
    def resident():
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s*(\d+)", status).group(1))

    large = torch.ones(2**24)
    del large
    kept = ib.memory.stats()
    if kept.reserved == kept.live:
        pytest.skip("large blocks are malloc's: no Linux")
    assert kept.reserved - kept.live >= 2**26
    before = resident()
    ib.memory.empty_cache()
    now = ib.memory.stats()
    assert now.reserved == now.live and before - resident() > 2**25


def test_reset_peak():
    tensor = torch.zeros(2**20)
    del tensor
    ib.memory.reset_peak()
    now = ib.memory.stats()
    assert now.peak == now.live


def test_available():
    assert 0 < ib.memory.available() <= ib.memory.stats().total


def test_peak_scope():
    live = ib.memory.stats().live
    with ib.memory.peak() as outer:
        torch.zeros(1000, dtype=torch.float64)
        with ib.memory.peak() as inner:
            torch.zeros(500, dtype=torch.float64)
    assert outer.peak - live >= 8000 and 4000 <= inner.peak - live < 8000


@pytest.mark.parametrize("as_text", [False, True])
def test_limit(as_text):
    live = ib.memory.stats().live
    bytes = live + 100_000
    with ib.memory.limit(f"{bytes} B" if as_text else bytes) as limit:
        assert limit.bytes == bytes == ib.memory.stats().limit
        torch.zeros(10_000)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(100_000)
        assert limit.refused >= live + 400_000
        with ib.memory.limit(live + 20_000), pytest.raises(torch.OutOfMemoryError):
            torch.zeros(10_000)
        torch.zeros(10_000)
        assert limit.bytes == bytes == ib.memory.stats().limit  # in force again
    assert ib.memory.stats().limit is None
    torch.zeros(100_000)


def test_a_limit_ends_with_an_exception():
    with pytest.raises(KeyError), ib.memory.limit("1GiB"):
        raise KeyError
    assert ib.memory.stats().limit is None


def test_fail_allocation():
    with ib.memory.fail_allocation(2) as failure:
        torch.zeros(10)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(10)
        torch.zeros(10)
        assert failure.failed and failure.seen == 3
    assert failure.failed and failure.seen == 3
    with ib.memory.fail_allocation() as counter:
        torch.zeros(10)
    assert counter.seen == 1 and not counter.failed


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ib.memory.limit("much"), ib.InvalidArgument, "much"),
        (lambda: ib.memory.limit(None), ib.InvalidType, "the limit must be a number of bytes"),
        (lambda: ib.memory.limit(0).__enter__(), ib.InvalidArgument, "0"),
        (lambda: ib.memory.fail_allocation(0).__enter__(), ib.InvalidArgument, "0"),
        (lambda: ib.memory.stats("meta"), ib.InvalidArgument, "meta"),
    ],
)
def test_misuse(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_context_is_entered_once():
    limit = ib.memory.limit("1GiB")
    with limit, pytest.raises(ib.StateError, match="entered already"):
        limit.__enter__()


def test_the_state_of_the_allocator_in_words():
    assert "count" in ib.memory.describe_cpu_allocator()
