"""Where numbers go: `log.jsonl` always, Weights & Biases when asked; and the machine's side of them."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from accelerate import Accelerator
from torch import nn

from ..data_prep.files import sync
from .config import TrackerConfig
from .files import dumps, read_jsonl, write_text
from .sampler import Sampler
from .step import StepReport

logger = logging.getLogger(__name__)

LOG = "log.jsonl"
# Dense bf16 peak in FLOP/s, from the makers' data sheets; the first name found in the device's name counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIE": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


class Tracker(Protocol):
    """What the loop needs of a place that numbers go to."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Note the values of a step."""
        ...

    def close(self) -> None:
        """Write out what is left."""
        ...


class JsonlFile:
    """A file of JSON lines with a `step` each, continued from `step`: later lines of a killed run are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in read_jsonl(path) if line["step"] <= step]
        write_text(path, "".join(dumps(line) + "\n" for line in kept))
        self.lines = kept
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line and hand it to the system."""
        self._file.write(dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        sync(self.path)

    def close(self) -> None:
        """Close the file; no more lines."""
        self._file.close()


class WandbTracker:
    """Weights & Biases. The run's id is kept in the run folder, so that resuming continues the same run."""

    def __init__(self, config: TrackerConfig, run_dir: Path, settings: Mapping[str, str]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("tracker.wandb=true needs wandb: pip install wandb, or tracker.wandb=false") from error
        identity = run_dir / "wandb_id"
        if not identity.exists():
            write_text(identity, uuid.uuid4().hex)
        self._run = wandb.init(
            project=config.project,
            name=run_dir.name,
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            mode="offline" if config.mode == "offline" else "online",
            dir=str(run_dir),
            config=dict(settings),
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run (uploads it when online)."""
        self._run.finish()


def memory_gb(device: torch.device) -> dict[str, float]:
    """Resident memory of this process and, on CUDA, the device's peak since the start, in GB (1e9 bytes)."""
    found = {"rss_gb": psutil.Process(os.getpid()).memory_info().rss / 1e9}
    if device.type == "cuda":
        found["cuda_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return found


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a CUDA device in FLOP/s, None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).upper()
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def flops_per_token(model: nn.Module) -> float:
    """FLOP that training takes for one token, without attention's quadratic part.

    2 for each weight in the forward pass, 2 for the gradient of activations and 2 more for the gradient of the weight
    if it is trained (Kaplan et al. 2020, section 2.1); embedding tables are looked up, not multiplied. With adapters
    on the last layers only, this counts activation gradients that are never computed: it is then too high.
    """
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return float(sum((6 if p.requires_grad else 4) * p.numel() for p in model.parameters() if id(p) not in tables))


class Meter:
    """Speed since the last logged line, and the line itself."""

    def __init__(self, model: nn.Module, accelerator: Accelerator, sampler: Sampler) -> None:
        self._device = accelerator.device
        self._sampler = sampler
        peak = peak_flops(self._device)
        self._flops_ratio = flops_per_token(model) / (peak * accelerator.num_processes) if peak else None
        self._tokens = 0
        self._seconds = 0.0
        self._steps = 0
        self.tokens_per_second = 0.0

    def add(self, report: StepReport, seconds: float) -> None:
        """Count one step that took `seconds`."""
        self._tokens += report.tokens
        self._seconds += seconds
        self._steps += 1
        self.tokens_per_second = self._tokens / max(self._seconds, 1e-9)

    def values(self, step: int, report: StepReport) -> dict[str, Any]:
        """The line of a step. Speed and seconds a step are means since the line before; the rest is this step's."""
        line: dict[str, Any] = {
            "epoch": round(self._sampler.epoch(step), 6),
            "loss": report.loss,
            **{f"loss/{name}": value for name, value in report.terms.items()},
            **{f"log/{name}": value for name, value in report.logs.items()},
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "tokens": report.tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds": self._seconds / self._steps,
            **memory_gb(self._device),
        }
        if report.padded_tokens:
            line["padding_share"] = 1.0 - report.tokens / report.padded_tokens
        if self._flops_ratio is not None:
            line["mfu"] = self.tokens_per_second * self._flops_ratio
        self._tokens, self._seconds, self._steps = 0, 0.0, 0
        return line
