"""`retrail train`: fine-tune a retriever, measured with its real inference loop.

One process: `retrail train ...`; several: `torchrun --nproc-per-node 8 -m retrail.scripts.train ...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import run_command
from .config import TrainRun
from .run_folder import RESULT, SETTINGS, save_result, start_run

if TYPE_CHECKING:
    import torch

    from ..data_prep.task import Task
    from ..eval.suites import Suite
    from .families import Built


def run(run: TrainRun) -> int:
    """Train, evaluate, and write `result.json`."""
    import torch

    from ..data_prep.task import Task
    from ..models.backbone import pick_device
    from ..train.config import FitConfig
    from ..train.loop import fit
    from .families import family_of

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
    family = family_of(run)
    built = family.build(run, device)
    objective, rows = family.objective(run, task, built)
    result = fit(
        built.model,
        objective,
        config=FitConfig(optim=run.optim, loop=run.loop, runtime=run.runtime, tracker=run.tracker),
        run_dir=folder,
        evaluate=None if suite is None else family.evaluation(run, task, built, suite),
        fingerprint=_fingerprint(run, task, built, family.facts(run, built)) | rows,
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


def _fingerprint(run: TrainRun, task: Task, built: Built, own: Mapping[str, object]) -> dict[str, str]:
    """What identifies data and model of a run, flat, so that a refusal can name the key that changed."""
    from ..models.exports import RETRIEVAL
    from .systems import file_hash

    facts: dict[str, object] = {"family": run.family}
    facts |= {"data.fingerprint": task.fingerprint, "data.split": run.data.split}
    for section in ("model", "adapter"):
        facts |= {f"{section}.{key}": value for key, value in asdict(getattr(run, section)).items()}
    start = Path(run.model.path).expanduser() / RETRIEVAL
    if start.is_file():  # an export may be made anew under the same name
        facts["model.export"] = file_hash(start)
    # `auto` is another type on another machine, and the same words are then another run.
    return {key: str(value) for key, value in (facts | dict(own) | {"model.dtype": built.dtype}).items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(TrainRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
