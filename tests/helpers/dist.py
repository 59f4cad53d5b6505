"""Runs a plain function on several gloo ranks of this machine."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _body(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # A frame of its own: DDP's locals of `fn` are dead before the group is destroyed. With them alive, half of the
    # runs hang.
    return fn(*args)


def _rank(
    fn: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...], out: Connection
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="true",
    )
    torch.set_num_threads(1)
    code = 0
    try:
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._reset_state()
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        result = _body(fn, args)
        dist.barrier()
        dist.destroy_process_group()
        out.send(("result", result))
    except BaseException:
        out.send(("error", traceback.format_exc()))
        code = 1
    out.close()
    # No interpreter shutdown in a forked child: pytest's own exit handlers belong to the parent.
    os._exit(code)


def run_ranks(fn: Callable[..., Any], world_size: int = 2, *args: Any, timeout: float = 60.0) -> list[Any]:
    """What `fn(*args)` returned on each rank (it must pickle), in rank order.

    Every rank is a forked process with one torch thread and the environment that torchrun sets. AssertionError with the
    traceback if a rank raises, or if the ranks have not ended after `timeout` seconds; nothing is left running.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=_rank, args=(fn, rank, world_size, port, args, pipes[rank][1]), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    answers: list[tuple[str, Any] | None] = [None] * world_size
    end = time.monotonic() + timeout
    try:
        while any(answer is None for answer in answers):
            for rank, (receiver, _) in enumerate(pipes):
                if answers[rank] is None and receiver.poll(0.02):
                    try:
                        answers[rank] = receiver.recv()
                    except EOFError:
                        processes[rank].join(5)
                        answers[rank] = ("error", f"ended with exit code {processes[rank].exitcode}, without a word")
            failed = [f"rank {r}: {a[1]}" for r, a in enumerate(answers) if a is not None and a[0] == "error"]
            assert not failed, "\n".join(failed)
            waiting = [r for r, a in enumerate(answers) if a is None]
            assert time.monotonic() < end, f"rank(s) {waiting} still run after {timeout} s: a hang"
        return [answer[1] for answer in answers if answer is not None]
    finally:
        for process in processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
