"""Typed settings of each command. Imports no torch, so that a typo fails at once.

`???` marks a value that the user has to give; the `example` beside it is shown when it is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..models.config import (
    AdapterConfig,
    DecisionConfig,
    EncoderConfig,
    ModelConfig,
    NavigateConfig,
    RecurseConfig,
    check_choice,
    check_positive,
)
from ..train.config import (
    DecisionObjectiveConfig,
    LoopConfig,
    OptimConfig,
    RuntimeConfig,
    StateObjectiveConfig,
    TrackerConfig,
)
from .config_base import REQUIRED, Command, check_text, required
from .config_data import READER_OPTIONS, PrepData, PrepRun
from .config_measure import AnswersRun, CalibrateRun, CurveRun, PoolsRun
from .config_search import (
    BASELINES,
    EvalData,
    EvalRun,
    RecurseBudget,
    SearchBudget,
    SearchRun,
    ServeRun,
    StaticRun,
    SuiteConfig,
    WalksRun,
)

__all__ = [
    "AnswersRun",
    "BASELINES",
    "CalibrateRun",
    "Command",
    "CurveRun",
    "EvalData",
    "EvalRun",
    "ExportRun",
    "PlanRun",
    "PoolsRun",
    "PrepData",
    "PrepRun",
    "PreparedData",
    "READER_OPTIONS",
    "REQUIRED",
    "RecurseBudget",
    "SearchBudget",
    "SearchRun",
    "ServeRun",
    "StaticRun",
    "SuiteConfig",
    "TrainEval",
    "TrainRun",
    "WalksRun",
    "check_text",
    "required",
]


@dataclass(kw_only=True, slots=True)
class PreparedData:
    """A folder written by `retrail prep`, and which of its splits to train on.

    path: the folder; what is measured is always its evaluation split.
    split: the split that gives training queries.
    mix: folders to train on instead of `path`, with the weight of each: its share of the training rows, whatever its
        size (empty: `path` alone). A small data set with a large weight is seen many times.
    """

    path: str = required("data/multidoc2dial")
    split: str = "train"
    mix: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, weight in self.mix.items():
            check_text("data.mix", path)
            check_positive(f"data.mix[{path}]", weight)


@dataclass(kw_only=True, slots=True)
class TrainEval:
    """What is measured during and after training, with the real inference loop.

    split: the split that is searched.
    limit: only a fixed sample of so many queries (null: all); more is steadier and slower.
    k: how deep the rankings go (null: the suite's); must reach as deep as the measures do.
    """

    split: str = "dev"
    limit: int | None = 100
    k: int | None = None

    def __post_init__(self) -> None:
        check_positive("eval.limit", self.limit)
        check_positive("eval.k", self.k)


@dataclass(kw_only=True, slots=True)
class TrainRun(Command):
    """Fine-tune a retriever, evaluate it with the real inference loop, keep the best checkpoint.

    name: name of the run.
    run_dir: folder of checkpoints, logs and results.
    resume: go on from the newest checkpoint in run_dir; false refuses a run_dir that already holds a run.
    family: which kind of retriever: `decision` reads the sections decision, objective and navigate, `recursive` reads
        encoder, contrast and recurse.
    """

    command: ClassVar[str] = "train"

    name: str = required("d0")
    run_dir: str = "runs/${name}"
    resume: bool = True
    family: str = "decision"
    data: PreparedData = field(default_factory=PreparedData)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    decision: DecisionConfig = field(default_factory=DecisionConfig)
    objective: DecisionObjectiveConfig = field(default_factory=DecisionObjectiveConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    contrast: StateObjectiveConfig = field(default_factory=StateObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    navigate: NavigateConfig = field(default_factory=NavigateConfig)
    recurse: RecurseConfig = field(default_factory=RecurseConfig)
    eval: TrainEval = field(default_factory=TrainEval)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        check_choice("family", self.family, ("decision", "recursive"))
        check_text("name", self.name)
        check_text("run_dir", self.run_dir)
        self.objective.check_fits(self.decision)
        if self.objective.teacher == "likelihood" and self.adapter.kind == "full":
            raise ValueError(
                "objective.teacher=likelihood is the model without its adapter, but adapter.kind=full changes the "
                "model itself; set adapter.kind=lora"
            )


@dataclass(kw_only=True, slots=True)
class PlanRun(TrainRun):
    """Say what `retrail train` with the same settings will take; no weights, no download, nothing is written.

    world_sizes: numbers of GPUs to estimate the memory for.
    steps: how many steps' batches are drawn; more tell better how long the slates get.
    """

    command: ClassVar[str] = "plan"

    name: str = "plan"
    world_sizes: list[int] = field(default_factory=lambda: [1, 8, 64])
    steps: int = 2

    def __post_init__(self) -> None:
        TrainRun.__post_init__(self)
        check_positive("steps", self.steps)
        if not self.world_sizes or min(self.world_sizes) < 1:
            raise ValueError(f"world_sizes={self.world_sizes} must list at least one number, each 1 or more")


@dataclass(kw_only=True, slots=True)
class ExportRun(Command):
    """Turn a run into a plain Hugging Face checkpoint that one `retrail.load` opens.

    run: folder of the run.
    to: the folder to write.
    checkpoint: `best` by the run's metric, or `last`.
    hub: also upload it as this model (null: do not).
    """

    command: ClassVar[str] = "export"

    run: str = required("runs/d0")
    to: str = required("export/d0")
    checkpoint: str = "best"
    hub: str | None = None

    def __post_init__(self) -> None:
        check_choice("checkpoint", self.checkpoint, ("best", "last"))
