"""Ranks: how many there are against how many were asked for, and what they say to each other."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from .config import RuntimeConfig

logger = logging.getLogger(__name__)

# Set by torchrun and by the MPI launchers; the same that Accelerate reads.
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# Modes of Accelerate whose parameters are sharded; with cpu=True it drops them without a word.
SHARDED_VARIABLES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
# While rank 0 evaluates or writes, the others wait for this long before they give up.
WAIT = timedelta(hours=24)


class RankError(RuntimeError):
    """Raised on the other ranks when rank 0 failed at work that only it does."""


def launched_processes(environment: Mapping[str, str]) -> int:
    """How many ranks the launcher says it started (1 without a launcher)."""
    for name in WORLD_SIZE_VARIABLES:
        if environment.get(name, "").strip():
            return int(environment[name])
    return 1


def check_world_size(*, asked: int | None, launched: int, seen: int, cpu: bool) -> None:
    """Raise RuntimeError with both numbers and the working command unless all counts of ranks agree.

    asked: `runtime.num_processes`. launched: what the launcher's environment says. seen: what Accelerate found.
    """
    wanted = asked or launched
    device = "runtime.device=cpu" if cpu else "runtime.device=cuda"
    command = (
        f"{'ACCELERATE_USE_CPU=true ' if cpu else ''}torchrun --nproc-per-node {wanted} "
        f"-m retrail.scripts.train ... {device} runtime.num_processes={wanted}"
    )
    if wanted == 1:
        command = f"python -m retrail.scripts.train ... {device}"
    if seen != launched:
        raise RuntimeError(
            f"the launcher started {launched} rank(s) but Accelerate sees {seen}, so each would train alone on its own "
            "copy. This happens when Accelerate was first initialised without the CPU flag, or by another launcher "
            f"than torchrun. Use: {command}"
        )
    if asked is not None and asked != seen:
        raise RuntimeError(
            f"runtime.num_processes={asked} but {seen} rank(s) run (`accelerate launch --cpu --num_processes N` starts "
            f"one process, whatever N). Use: {command} - or leave runtime.num_processes out to take what the launcher "
            "gives."
        )


def _use_cpu(runtime: RuntimeConfig) -> bool:
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("runtime.device=cuda, but PyTorch sees no CUDA device; use runtime.device=cpu or auto")
    return runtime.device == "cpu" or not torch.cuda.is_available()


def make_accelerator(runtime: RuntimeConfig, *, bf16_parameters: bool = False) -> Accelerator:
    """An Accelerator on the device and in the precision asked for, whose ranks have been counted.

    On a CPU Accelerate is told so itself: without that, `torchrun` starts ranks that each believe to be alone.
    Raises RuntimeError for a wrong number of ranks (see `check_world_size`) and for sharded modes, which this loop's
    checkpoints do not cover.
    """
    for name in SHARDED_VARIABLES:
        if os.environ.get(name, "false").lower() in ("true", "1", "yes"):
            raise RuntimeError(
                f"{name}={os.environ[name]} asks for sharded parameters, but this loop trains with DDP; unset it"
            )
    launched = launched_processes(os.environ)
    cpu = _use_cpu(runtime)
    partial = PartialState(cpu=cpu)
    check_world_size(asked=runtime.num_processes, launched=launched, seen=partial.num_processes, cpu=cpu)
    if (partial.device.type == "cpu") != cpu:
        raise RuntimeError(
            f"runtime.device={runtime.device}, but this process already uses {partial.device}: Accelerate keeps one "
            "device per process; start a new one"
        )
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    precision = runtime.mixed_precision
    if precision == "auto":
        precision = "bf16" if not cpu or bf16_parameters else "no"
    # A second run in this process may want another precision; devices and ranks (PartialState) stay as they are.
    AcceleratorState._reset_state()
    return Accelerator(
        mixed_precision=precision,
        cpu=cpu,
        dynamo_backend="inductor" if runtime.compile else "no",
    )


def end_processes() -> None:
    """Leave the process group, after `fit` has returned on every rank (its wrapped model must be gone by then)."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Switch it on in the model, or in the one inside that can; ValueError if none can."""
    for module in model.modules():
        enable = getattr(module, "gradient_checkpointing_enable", None)
        if callable(enable):
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return
    raise ValueError(
        "runtime.activation_checkpointing=true, but no part of the model has gradient_checkpointing_enable(); "
        "set it to false"
    )


class Ranks:
    """The ranks of one run.

    Messages (JSON, never pickle) go over a group of their own on the CPU whose waits are long, so that evaluation
    on rank 0 may take hours while a hang in training is still found by the default timeout.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank: int = accelerator.process_index
        self.size: int = accelerator.num_processes
        self.is_main = self.rank == 0
        self._device = accelerator.device
        self._side = dist.new_group(backend="gloo", timeout=WAIT) if self.size > 1 else None

    def sum(self, values: Sequence[float] | Tensor) -> list[float]:
        """Sums over ranks, in float64, the same on every rank. Waits for the device."""
        total = torch.as_tensor(values, dtype=torch.float64, device=self._device)
        if self.size > 1:
            total = total.clone()
            dist.all_reduce(total)
        numbers: list[float] = total.tolist()
        return numbers

    def gather_rows(self, rows: Tensor) -> tuple[Tensor, int]:
        """Every rank's rows (n, D), in rank order, and where this rank's begin; ranks may have different numbers."""
        if self.size == 1:
            return rows, 0
        counts = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=self._device))
        sizes = [int(count) for count in counts]
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        together = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return together, sum(sizes[: self.rank])

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over ranks of a tensor of the same shape everywhere, on every rank; `values` are left as they are."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), in rank order, on every rank."""
        if self._side is None:
            return [value]
        data = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._side)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b" ")), dtype=torch.uint8)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self._side)
        return [json.loads(bytes(text.tolist())) for text in texts]

    def union(self, names: Iterable[str]) -> tuple[str, ...]:
        """Sorted names that any rank has."""
        return tuple(sorted({name for part in self.gather(sorted(names)) for name in part}))

    def on_main(self, work: Callable[[], Any]) -> Any:
        """What `work` returned on rank 0 (anything JSON can hold), on every rank; the others wait.

        An exception leaves rank 0 as it is, and the other ranks as RankError with its text.
        """
        if self._side is None:
            return work()
        if not self.is_main:
            answer = self._broadcast(None)
            if "error" in answer:
                raise RankError(f"rank 0 failed: {answer['error']}")
            return answer["value"]
        try:
            value = work()
        except BaseException as error:
            self._broadcast({"error": f"{type(error).__name__}: {error}"})
            raise
        self._broadcast({"value": value})
        return value

    def _broadcast(self, value: Any) -> Any:
        data = json.dumps(value).encode()
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self._side)
        text = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self.is_main
            else torch.zeros(int(size), dtype=torch.uint8)
        )
        dist.broadcast(text, src=0, group=self._side)
        return json.loads(bytes(text.tolist()))

    def close(self) -> None:
        """Give the message group back."""
        if self._side is not None:
            dist.destroy_process_group(self._side)
            self._side = None
