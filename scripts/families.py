"""What a command does differently for each family of retrievers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .config import TrainRun

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..data_prep.task import Task
    from ..eval.suites import Suite
    from ..train.evaluation import Evaluate
    from ..train.objectives.base import Objective


@dataclass(frozen=True, slots=True)
class Built:
    """A model that can be trained, and what turns text into its tokens (a family's own type)."""

    model: nn.Module
    renderer: Any
    dtype: str


class Family(Protocol):
    """How models of one family are built, trained, measured and exported, from the settings of a run."""

    def build(self, run: TrainRun, device: torch.device, *, to_merge: bool = False) -> Built:
        """The model with what trains; `to_merge`: its adapter will be folded into it."""
        ...

    def objective(self, run: TrainRun, task: Task, built: Built) -> tuple[Objective, dict[str, str]]:
        """What is minimised, and what identifies its rows."""
        ...

    def evaluation(self, run: TrainRun, task: Task, built: Built, suite: Suite) -> Evaluate:
        """(model, step) -> metrics of the real inference loop on the evaluation split."""
        ...

    def facts(self, run: TrainRun, built: Built) -> Mapping[str, object]:
        """What identifies the model and its prompts, flat: a run that is resumed with another value is refused."""
        ...

    def export(self, run: TrainRun, task: Task, built: Built, to: str, facts: Mapping[str, Any]) -> Path:
        """Write, reload and compare the folder `to`; `facts` are name, training, data and metrics."""
        ...


def family_of(run: TrainRun) -> Family:
    """The family that a run trains."""
    from .family_decision import DecisionFamily
    from .family_recursive import RecursiveFamily

    families: dict[str, type[Family]] = {"decision": DecisionFamily, "recursive": RecursiveFamily}
    return families[run.family]()
