"""DecisionRAG in the commands: build, train, measure and export a decision model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .config import TrainRun
from .families import Built

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..data_prep.task import Task
    from ..eval.suites import Suite
    from ..models.decision.model import DecisionModel
    from ..models.protocols import Slate
    from ..train.evaluation import Evaluate
    from ..train.objectives.base import Objective

_PROBES = 4
_PROBE_CANDIDATES = 8


class DecisionFamily:
    """A `Family`; its renderer is a `SlateLayout`."""

    def build(self, run: TrainRun, device: torch.device, *, to_merge: bool = False) -> Built:
        """The decision model of the settings."""
        from ..models.decision.build import build_decision

        model, layout = build_decision(run.model, run.decision, device, run.adapter, to_merge=to_merge)
        return Built(model, layout, str(model.backbone.dtype))

    def objective(self, run: TrainRun, task: Task, built: Built) -> tuple[Objective, dict[str, str]]:
        """Slates along the gold paths."""
        from .rows import build_objective

        return build_objective(run, task, built.renderer, cast("DecisionModel", built.model))

    def evaluation(self, run: TrainRun, task: Task, built: Built, suite: Suite) -> Evaluate:
        """Navigation of the evaluation split."""
        from ..eval.suites import evaluate_suite
        from ..models.decision.navigate import Navigator
        from ..models.decision.scorer import LocalScorer

        def evaluate(model: nn.Module, step: int) -> Mapping[str, float]:
            scorer = LocalScorer(cast("DecisionModel", model), built.renderer)
            navigator = Navigator(scorer, task.corpus, run.navigate)
            return dict(evaluate_suite(navigator, task, suite, name=f"step {step}").values)

        return evaluate

    def facts(self, run: TrainRun, built: Built) -> Mapping[str, object]:
        """Settings of the slates, and the contract of prompt and tokenizer."""
        from ..models.decision.build import contract

        facts: dict[str, object] = {}
        for section in ("decision", "objective"):
            facts |= {f"{section}.{key}": value for key, value in asdict(getattr(run, section)).items()}
        parts = contract(built.renderer)
        return facts | {f"contract.{key}": value for key, value in parts.items() if key != "decision"}

    def export(self, run: TrainRun, task: Task, built: Built, to: str, facts: Mapping[str, Any]) -> Path:
        """A Hugging Face folder that gives the answers of the model on a few real slates."""
        from ..train.export import ExportFacts, export_decision

        probes = _probes(task, run.data.split)
        model = cast("DecisionModel", built.model)
        return export_decision(model, built.renderer, to, ExportFacts(navigate=run.navigate, **facts), probes)


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
