"""`retrail export`: a run becomes a Hugging Face folder, reloaded and checked before it is said done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import run_command
from .config import ExportRun
from .run_folder import load_settings

if TYPE_CHECKING:
    from ..train.checkpoint import Checkpoint


def run(run: ExportRun) -> int:
    """Export, and upload where asked."""
    from ..data_prep.task import Task
    from ..models.backbone import pick_device
    from ..train.checkpoint import load_tensors
    from ..train.export_folder import check_target
    from ..train.hub import check_repo
    from .families import family_of

    check_target(run.to)
    if run.hub:
        check_repo(run.hub)
    folder = Path(run.run)
    settings = load_settings(folder)
    checkpoint = find_checkpoint(folder, run.checkpoint)
    task = Task.open(settings.data.path)
    family = family_of(settings)
    built = family.build(settings, pick_device("auto"), to_merge=True)
    load_tensors(built.model, checkpoint.path)
    facts = {
        "name": Path(run.to).name,
        "training": asdict(settings) | {"checkpoint": checkpoint.path.name},
        # As it was when the run started; the folder may have been prepared anew since then.
        "data": {"name": task.name, "fingerprint": checkpoint.state["fingerprint"]["data.fingerprint"]},
        "metrics": _metrics(folder, checkpoint.step),
    }
    target = family.export(settings, task, built, run.to, facts)
    print(f"exported {checkpoint.path.name} of {folder} to {target}; reloaded, and its answers are the same")
    if run.hub:
        from ..train.hub import push

        print(f"uploaded: {push(target, run.hub)}")
    return 0


def find_checkpoint(folder: Path, which: str) -> Checkpoint:
    """The best or the last whole checkpoint of a run; `best` is the last where no metric was followed.

    Raises:
        FileNotFoundError: the run has no checkpoint.
        ValueError: the best one is damaged; the last one may not be.
    """
    from ..train.checkpoint import CheckpointError, newest_good, read_checkpoint
    from ..train.evaluation import BEST
    from ..train.loop import CHECKPOINTS

    if which == "best" and (folder / BEST).is_file():
        best = folder / json.loads((folder / BEST).read_text())["checkpoint"]
        try:
            return read_checkpoint(best)
        except CheckpointError as error:
            raise ValueError(f"the best checkpoint is damaged: {error}. Export another with checkpoint=last") from error
    found = newest_good(folder / CHECKPOINTS)
    if found is None:
        raise FileNotFoundError(f"{folder} has no checkpoint yet; let `retrail train` reach loop.save_every steps")
    return found


def _metrics(folder: Path, step: int) -> dict[str, float]:
    """What was measured of the checkpoint that is exported, not of another; {} where it was not evaluated."""
    from ..train.evaluation import EVALUATIONS
    from ..train.files import read_jsonl

    found = [line["metrics"] for line in read_jsonl(folder / EVALUATIONS) if line["step"] == step]
    return {name: value for name, value in found[-1].items() if value is not None} if found else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(ExportRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
