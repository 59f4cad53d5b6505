"""`retrail train`: fine-tune a retriever, measured with its real inference loop.

One process: `retrail train ...`; several: `torchrun --nproc-per-node 8 -m retrail.scripts.train ...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .cli import run_command
from .config import TrainRun
from .run_folder import RESULT, SETTINGS, save_result, start_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..data_prep.task import Task
    from ..eval.suites import Suite
    from ..models.decision.layout import SlateLayout
    from ..models.decision.model import DecisionModel
    from ..train.evaluation import Evaluate


def run(run: TrainRun) -> int:
    """Train, evaluate, and write `result.json`."""
    import torch

    from ..data_prep.task import Task
    from ..models.backbone import pick_device
    from ..models.decision.build import build_decision
    from ..train.config import FitConfig
    from ..train.loop import fit
    from .rows import build_objective

    folder = Path(run.run_dir)
    main = os.environ.get("RANK", "0") == "0"
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _refuse_taken(run, folder)  # several ranks hear it together, from rank 0
    task = Task.open(run.data.path)
    suite = _suite(run, task)  # a mistake in it should be known before hours of training
    torch.manual_seed(run.loop.seed)
    if run.runtime.threads:
        torch.set_num_threads(run.runtime.threads)
    device = _own_device(pick_device(run.runtime.device))
    model, layout = build_decision(run.model, run.decision, device, run.adapter)
    objective, rows = build_objective(run, task, layout, model)
    result = fit(
        model,
        objective,
        config=FitConfig(optim=run.optim, loop=run.loop, runtime=run.runtime, tracker=run.tracker),
        run_dir=folder,
        evaluate=None if suite is None else _evaluation(run, task, layout, suite),
        fingerprint=_fingerprint(run, task, layout, str(model.backbone.dtype)) | rows,
        started=lambda: _start(run, folder),
    )
    if main:
        save_result(folder, result.metrics, loss=result.loss, steps=result.steps, best=result.best or {})
        print(f"trained {result.steps} steps, loss {result.loss:.4f}; {folder / RESULT}")
        print(f"next: retrail export run={folder} to=export/{folder.name}")
    return 0


def _start(run: TrainRun, folder: Path) -> None:
    _refuse_taken(run, folder)
    start_run(run, folder)


def _refuse_taken(run: TrainRun, folder: Path) -> None:
    if not run.resume and (folder / SETTINGS).exists():
        raise FileExistsError(f"{folder} already holds a run; choose another name, or resume=true to go on")


def _own_device(device: torch.device) -> torch.device:
    """The GPU of this rank, where several share a machine."""
    import torch

    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return device


def _suite(run: TrainRun, task: Task) -> Suite | None:
    """What is measured between steps; None where evaluation is switched off.

    Raises:
        ValueError: the task lacks the split, or `loop.best_metric` is none of the measures.
    """
    if not run.loop.eval_every and not run.loop.best_metric:
        return None
    from ..eval.suites import SUITES, Suite

    # A prepared folder may name its variant: `multidoc2dial-structure`.
    suite = SUITES.get(task.name.partition("-")[0]) or Suite(
        name=task.name, split="dev", metrics=("Hit@1", "Hit@5", "MRR@10"), k=10
    )
    suite = replace(suite, split=run.eval.split, limit=run.eval.limit, k=run.eval.k or suite.k)
    if run.eval.split not in task.splits:
        raise ValueError(f"eval.split={run.eval.split}: {run.data.path} has only: {', '.join(task.splits)}")
    known = [*suite.metrics, *(f"document_{metric}" for metric in suite.document_metrics)]
    if run.loop.best_metric and run.loop.best_metric not in known:
        raise ValueError(f"loop.best_metric={run.loop.best_metric} is not measured; use one of: {', '.join(known)}")
    return suite


def _evaluation(run: TrainRun, task: Task, layout: SlateLayout, suite: Suite) -> Evaluate:
    """(model, step) -> metrics of navigating the evaluation split."""
    from ..eval.suites import evaluate_suite
    from ..models.decision.navigate import Navigator
    from ..models.decision.scorer import LocalScorer

    def evaluate(model: nn.Module, step: int) -> Mapping[str, float]:
        navigator = Navigator(LocalScorer(cast("DecisionModel", model), layout), task.corpus, run.navigate)
        return dict(evaluate_suite(navigator, task, suite, name=f"step {step}").values)

    return evaluate


def _fingerprint(run: TrainRun, task: Task, layout: SlateLayout, dtype: str) -> dict[str, str]:
    """What identifies data and model of a run, flat, so that a refusal can name the key that changed."""
    from ..models.decision.build import contract
    from ..models.load import RETRIEVAL
    from .systems import file_hash

    facts: dict[str, object] = {"family": run.family}
    facts |= {"data.fingerprint": task.fingerprint, "data.split": run.data.split}
    for section in ("model", "decision", "adapter", "objective"):
        facts |= {f"{section}.{key}": value for key, value in asdict(getattr(run, section)).items()}
    facts |= {f"contract.{key}": value for key, value in contract(layout).items() if key != "decision"}
    start = Path(run.model.path).expanduser() / RETRIEVAL
    if start.is_file():  # an export may be made anew under the same name
        facts["model.export"] = file_hash(start)
    # `auto` is another type on another machine, and the same words are then another run.
    return {key: str(value) for key, value in (facts | {"model.dtype": dtype}).items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(TrainRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
