"""Settings of the commands that fit and measure what searches do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..models.config import (
    check_choice,
    check_positive,
)
from .config_base import Command, check_text, required
from .config_search import BASELINES, EvalData, SearchBudget, SuiteConfig


@dataclass(kw_only=True, slots=True)
class AnswersRun(Command):
    """Answer queries from what retrievers find, and let a judge compare the answers with references.

    retriever: an exported folder, `bm25`, `dense`, or `generative:LM` (see `lm`), which writes numbers as it walks.
    split: which queries; those with a reference answer are asked (`un_questions` of mtrag).
    lm: who answers: a folder, a Hub id, `package:smollm2`, or `server:MODEL@http://HOST:PORT/v1` for any server that
        speaks the OpenAI API, whose key is in the environment variable RETRAIL_LM_KEY.
    judge: who judges (null: the same model); a server must give log-probabilities.
    top: how many passages are shown; more hold the answer more often, cost tokens and distract.
    max_tokens: of an answer.
    min_label_mass: the least probability that the judge must give to yes and no together.
    baselines: retrievers in the same table, as those of `retrail eval`.
    cache: a file that keeps what models answered, so that a stopped run goes on without paying twice (null: none).
    limit: only a fixed sample of so many queries (null: all).
    out: folder of answers and table (null: `answers` in the retriever's folder).
    """

    command: ClassVar[str] = "answers"

    retriever: str = required("export/d0")
    lm: str = required("package:smollm2")
    judge: str | None = None
    data: EvalData = field(default_factory=EvalData)
    navigate: SearchBudget = field(default_factory=SearchBudget)
    split: str = "un_questions"
    top: int = 5
    max_tokens: int = 256
    min_label_mass: float = 0.05
    baselines: list[str] = field(default_factory=lambda: ["bm25"])
    cache: str | None = None
    limit: int | None = None
    out: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_text("lm", self.lm)
        for key in ("top", "max_tokens", "limit"):
            check_positive(key, getattr(self, key))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        for name in self.baselines:
            check_choice("baselines", name, BASELINES)
        if not 0 <= self.min_label_mass < 1:
            raise ValueError(f"min_label_mass={self.min_label_mass} must be 0 or more and below 1")


@dataclass(kw_only=True, slots=True)
class CalibrateRun(Command):
    """Fit budgets that keep the gold path with probability 1 - alpha, and measure them on queries held out.

    Search with them: `navigate.budget=calibrated navigate.calibration=FILE`.

    retriever: an exported folder.
    split: which labelled queries; not those of training, to which the model answers too well.
    alpha: the share of queries that may lose their gold path; smaller opens more candidates and needs more queries.
    confidence: how surely the promise is kept with these very queries; null promises it on average over sets of
        queries, which takes fewer of them, opens fewer candidates, and falls short with some sets.
    score: what the thresholds bound: log-`odds`, `gap` to the best, softmax `mass` above, `rank` (a calibrated k), or
        `auto`, on each level the one that opens fewest candidates.
    gold: a query with several gold nodes survives if `any` path does, or only if `all` do.
    holdout: the share of queries that only measure; 0 measures nothing and leaves more to fit with.
    fixed_k: fixed budgets to compare with, every combination over the levels; [] compares none. Each number costs a
        walk of the held-out queries for every number of the level above.
    seed: which queries are held out, and which fit which level.
    to: the file to write; one that is there is replaced.
    """

    command: ClassVar[str] = "calibrate"

    retriever: str = required("export/d0")
    data: EvalData = field(default_factory=EvalData)
    split: str = "dev"
    alpha: float = 0.05
    confidence: float | None = 0.9
    score: str = "auto"
    gold: str = "any"
    holdout: float = 0.5
    fixed_k: list[int] = field(default_factory=lambda: [1, 2, 3, 5, 10, 20, 30])
    navigate: SearchBudget = field(default_factory=SearchBudget)
    seed: int = 0
    to: str = "calibration.json"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_choice("score", self.score, ("auto", "odds", "gap", "mass", "rank"))
        check_choice("gold", self.gold, ("any", "all"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_text("to", self.to)
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha={self.alpha} must be above 0 and below 1")
        if self.confidence is not None and not 0 < self.confidence < 1:
            raise ValueError(f"confidence={self.confidence} must be above 0 and below 1, or null")
        if not 0 <= self.holdout < 1:
            raise ValueError(f"holdout={self.holdout} must be 0 or more and below 1")
        if any(k < 1 for k in self.fixed_k):
            raise ValueError(f"fixed_k={self.fixed_k} must list numbers of 1 or more")


@dataclass(kw_only=True, slots=True)
class CurveRun(Command):
    """Measure a walk with less and less of the first level kept, beside a walk that loses nothing above the pages.

    retriever: an exported folder.
    shares: which shares of the first level stay, 0 to 1.
    metric: the measure of the picture.
    split: which queries (null: the suite's).
    limit: only a fixed sample of so many queries (null: all).
    out: folder of the table and the picture (null: `curve` in the retriever's folder).
    """

    command: ClassVar[str] = "curve"

    retriever: str = required("export/d0")
    data: EvalData = field(default_factory=EvalData)
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    navigate: SearchBudget = field(default_factory=SearchBudget)
    shares: list[float] = field(default_factory=lambda: [0.01, 0.05, 0.15, 0.5, 1.0])
    metric: str = "Recall@10"
    split: str | None = None
    limit: int | None = None
    out: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_positive("limit", self.limit)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        if not self.shares or not all(0.0 < share <= 1.0 for share in self.shares):
            raise ValueError(f"shares={self.shares} must list at least one number above 0 and at most 1")


@dataclass(kw_only=True, slots=True)
class PoolsRun(Command):
    """Judge fixed pools of candidates with fewer or more of them side by side: do rivals help to compare?

    retriever: an exported folder.
    split: which queries.
    depth: candidates of a pool: the gold nodes and the best of `negatives` in turn.
    negatives: where wrong candidates come from: `bm25`, `dense` (MiniLM), `splade`.
    sizes: how many candidates stand in one request; the others are compared with the last.
    anchors: also judge the sizes that split a pool with so many anchors in each slate (0: not).
    pages: also judge page by page, with and without a temperature by slate size that was fitted on the other half of
        the pools.
    metrics: measures; the first is compared query by query.
    limit: only a fixed sample of so many queries (null: all).
    out: folder of the table (null: `pools` in the retriever's folder).
    """

    command: ClassVar[str] = "pools"

    retriever: str = required("export/d0")
    data: EvalData = field(default_factory=EvalData)
    split: str = "dev"
    depth: int = 200
    negatives: list[str] = field(default_factory=lambda: ["bm25", "splade", "dense"])
    sizes: list[int] = field(default_factory=lambda: [1, 10, 50, 200])
    anchors: int = 4
    pages: bool = True
    metrics: list[str] = field(default_factory=lambda: ["Hit@1", "Hit@5", "MRR"])
    limit: int | None = None
    out: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_positive("limit", self.limit)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        for name in self.negatives:
            check_choice("negatives", name, ("bm25", "dense", "splade"))
        if self.anchors < 0:
            raise ValueError(f"anchors={self.anchors} must be 0 or more")
        if self.depth < 2 or not self.sizes or min(self.sizes) < 1 or not self.metrics or not self.negatives:
            raise ValueError(
                f"depth={self.depth} must be 2 or more, and sizes={self.sizes} (each 1 or more), "
                f"metrics={self.metrics} and negatives={self.negatives} must each name at least one"
            )
