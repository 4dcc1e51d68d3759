"""A function run on two ranks, processes that talk by gloo."""

import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


def rank_main(body: Callable[..., Any], rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    try:
        results.put((rank, body(rank)))
    except BaseException:
        results.put((None, f"rank {rank}:\n{traceback.format_exc()}"))
        raise
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(body: Callable[[int], Any]) -> list[Any]:
    """What `body(rank)` returns on each; a function of a module's, its result without tensors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked by a process that has imported torch and nothing has run in: importing takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "infinitybatch"])
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(body, r, port, results)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        found = {}
        for _ in ranks:
            rank, result = results.get(timeout=300)
            assert rank is not None, result  # the other may wait for this one for ever
            found[rank] = result
        for process in ranks:
            process.join(timeout=120)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
    return [found[rank] for rank in range(2)]
