"""Evaluation between steps: it never changes the trajectory, may be repeated, and picks the best checkpoint.

Rank 0 evaluates while the others wait (for up to a day): inference loops are not written for many ranks, and a result
that is one number must come from one place. What was found is in `eval.jsonl`, from which the best follows; so
a run that is killed during an evaluation repeats it, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import LoopConfig
from .files import write_json
from .rng import preserved_rng
from .tracking import JsonlFile

EVALUATIONS = "eval.jsonl"
BEST = "best.json"
Evaluate = Callable[[nn.Module, int], Mapping[str, float]]


@contextmanager
def module_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in training or eval mode as before, whatever happened inside."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside: eval mode, no gradients, and random generators that are put back."""
    with module_modes(model), preserved_rng(), torch.no_grad():
        model.eval()
        yield


class Evaluations:
    """What rank 0 knows of the evaluations of a run folder, continued from `step`."""

    def __init__(self, evaluate: Evaluate, config: LoopConfig, run_dir: Path, step: int) -> None:
        self._evaluate = evaluate
        self._config = config
        self._run_dir = run_dir
        self._file = JsonlFile(run_dir / EVALUATIONS, step)

    def metrics_at(self, step: int) -> dict[str, float] | None:
        """Metrics found after `step` steps, None if none were."""
        metrics = next((line["metrics"] for line in reversed(self._file.lines) if line["step"] == step), None)
        if metrics is not None:
            self._check_name(metrics)
        return metrics

    def run(self, model: nn.Module, step: int) -> dict[str, float]:
        """Metrics of the model after `step` steps; not yet written anywhere.

        Raises ValueError that lists the names there are, if `loop.best_metric` is not one of them.
        """
        with evaluation_mode(model):
            metrics = {str(name): float(value) for name, value in self._evaluate(model, step).items()}
        self._check_name(metrics)
        return metrics

    def _check_name(self, metrics: Mapping[str, float]) -> None:
        name = self._config.best_metric
        if name and name not in metrics:
            raise ValueError(
                f"loop.best_metric={name!r} is not among the evaluated numbers; "
                f"use one of: {', '.join(sorted(metrics)) or 'none'}"
            )

    def is_best(self, metrics: Mapping[str, float], best: Mapping[str, Any] | None) -> bool:
        """Whether `metrics` beat the best so far (an equal number does not, nor does NaN)."""
        name = self._config.best_metric
        if not name or not math.isfinite(metrics[name]):
            return False
        if best is None:
            return True
        value = float(best["value"])
        return metrics[name] > value if self._config.best_mode == "max" else metrics[name] < value

    def record(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Write the line of an evaluation, on disk before this returns."""
        values = {"metrics": dict(metrics), "seconds": seconds}
        self._file.log(step, values)
        self._file.sync()
        self._file.lines.append({"step": step, **values})

    def best(self, saved: set[int]) -> dict[str, Any] | None:
        """{metric, mode, value, step} of the best evaluation whose checkpoint is among the `saved` steps."""
        best: dict[str, Any] | None = None
        name = self._config.best_metric
        for line in self._file.lines:
            # A null stands for NaN or an infinity.
            if line["step"] in saved and line["metrics"].get(name) is not None and self.is_best(line["metrics"], best):
                best = {
                    "metric": name,
                    "mode": self._config.best_mode,
                    "value": line["metrics"][name],
                    "step": line["step"],
                }
        return best

    def write_best(self, best: dict[str, Any] | None) -> None:
        """Replace `best.json`, or remove it if there is no best."""
        path = self._run_dir / BEST
        if best is None:
            path.unlink(missing_ok=True)
        else:
            write_json(path, best | {"checkpoint": f"checkpoints/step_{best['step']:08d}"})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
