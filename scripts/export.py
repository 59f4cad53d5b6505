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
    from ..data_prep.task import Task
    from ..models.protocols import Slate
    from ..train.checkpoint import Checkpoint

_PROBES = 4
_PROBE_CANDIDATES = 8


def run(run: ExportRun) -> int:
    """Export, and upload where asked."""
    from ..data_prep.task import Task
    from ..models.backbone import pick_device
    from ..models.decision.build import build_decision
    from ..train.checkpoint import load_tensors
    from ..train.export import ExportFacts, check_target, export_decision
    from ..train.hub import check_repo

    check_target(run.to)
    if run.hub:
        check_repo(run.hub)
    folder = Path(run.run)
    settings = load_settings(folder)
    checkpoint = find_checkpoint(folder, run.checkpoint)
    task = Task.open(settings.data.path)
    device = pick_device("auto")
    model, layout = build_decision(settings.model, settings.decision, device, settings.adapter, to_merge=True)
    load_tensors(model, checkpoint.path)
    facts = ExportFacts(
        name=Path(run.to).name,
        navigate=settings.navigate,
        training=asdict(settings) | {"checkpoint": checkpoint.path.name},
        # As it was when the run started; the folder may have been prepared anew since then.
        data={"name": task.name, "fingerprint": checkpoint.state["fingerprint"]["data.fingerprint"]},
        metrics=_metrics(folder, checkpoint.step),
    )
    target = export_decision(model, layout, run.to, facts, _probes(task, settings.data.split))
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


def _probes(task: Task, split: str) -> list[Slate]:
    """A few real slates whose answers the folder remembers."""
    from ..models.decision.slates import node_candidate
    from ..models.protocols import Slate

    leaves = [int(row) for row in task.corpus.leaves()]
    step = max(1, len(leaves) // (_PROBES * _PROBE_CANDIDATES))
    rows = leaves[::step]
    return [
        Slate(query.text, tuple(node_candidate(task.corpus, row) for row in rows[n::_PROBES][:_PROBE_CANDIDATES]))
        for n, query in enumerate(task.queries(split)[:_PROBES])
        if rows[n::_PROBES]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(ExportRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
