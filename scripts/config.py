"""Typed settings of each command. Imports no torch, so that a typo fails at once.

`???` marks a value that the user has to give; the `example` beside it is shown when it is missing.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from ..models.config import (
    AdapterConfig,
    DecisionConfig,
    ModelConfig,
    NavigateConfig,
    PriceConfig,
    check_choice,
    check_positive,
)
from ..train.config import DecisionObjectiveConfig, LoopConfig, OptimConfig, RuntimeConfig, TrackerConfig

REQUIRED = "???"


def required(example: str) -> Any:
    """A text field that the user has to give, with a value to show as an example."""
    return field(default=REQUIRED, metadata={"example": example})


class Command:
    """Settings of one command; `command` is its name on the command line and that of its YAML file."""

    __slots__ = ()
    command: ClassVar[str]


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
    family: which kind of retriever.
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
    optim: OptimConfig = field(default_factory=OptimConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    navigate: NavigateConfig = field(default_factory=NavigateConfig)
    eval: TrainEval = field(default_factory=TrainEval)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        check_choice("family", self.family, ("decision",))
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


# Each further setting means what it means there.
PlanRun.__doc__ = f"{PlanRun.__doc__}{(TrainRun.__doc__ or '').partition('.')[2]}"

BASELINES = (
    "bm25",
    "dense",
    "rerank",
    "untrained",
    "likelihood",
    "flat",
    "page_by_page",
    "pointwise",
    "hybrid_bm25",
    "hybrid_dense",
)
READER_OPTIONS = {
    "pydocs": (),
    "multidoc2dial": ("documents", "dialogues", "split_by", "segmentation", "words", "domain_level", "skip_missing"),
    "beir": ("splits", "skip_empty", "allow_dangling"),
}


@dataclass(kw_only=True, slots=True)
class PrepData:
    """Which reader, and its options.

    name: the reader.
    documents: (multidoc2dial) file of the documents in `path` (null: the one named `*doc2dial_doc*.json`, also
        gzipped).
    dialogues: (multidoc2dial) files of the dialogues in `path` (null: all named `*doc2dial_dial_*.json`, also gzipped).
    split_by: (multidoc2dial) `files` takes each file of dialogues as the split in its name, `hash` divides dialogues
        by their ids into train (8 of 10 buckets) and dev (1 of 10), `auto` does the second if there is only one file.
    segmentation: (multidoc2dial) passages are sections (`structure`) or runs of `words` words (`token`).
    words: (multidoc2dial) words of a `token` passage; fewer makes passages more precise and the tree wider.
    domain_level: (multidoc2dial) whether domains are the root level, above the documents.
    skip_missing: (multidoc2dial) leave out turns that are grounded in a document that is not there, instead of
        stopping.
    splits: (beir) which files of `qrels/` to take (null: all).
    skip_empty: (beir) leave out documents without title and text, instead of stopping.
    allow_dangling: (beir) keep judgements of documents that the corpus lacks, instead of stopping; nobody can find
        them.
    """

    name: str = "pydocs"
    documents: str | None = None
    dialogues: list[str] | None = None
    split_by: str = "auto"
    segmentation: str = "structure"
    words: int = 100
    domain_level: bool = True
    skip_missing: bool = False
    splits: list[str] | None = None
    skip_empty: bool = False
    allow_dangling: bool = False

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, tuple(READER_OPTIONS))
        check_choice("data.split_by", self.split_by, ("auto", "files", "hash"))
        check_choice("data.segmentation", self.segmentation, ("structure", "token"))
        check_positive("data.words", self.words)
        for option in fields(self)[1:]:
            if option.name not in READER_OPTIONS[self.name] and getattr(self, option.name) != option.default:
                raise ValueError(f"data.{option.name} has no meaning for data={self.name}; leave it out")


@dataclass(kw_only=True, slots=True)
class PrepRun(Command):
    """Read a data set in its published format and write a prepared folder: corpus, queries, judgements.

    path: folder of the raw data (not for `pydocs`, which is on every machine).
    out: the folder to write.
    overwrite: replace a prepared folder that is already there, once the new one is whole.
    """

    command: ClassVar[str] = "prep"

    data: PrepData = field(default_factory=PrepData)
    path: str | None = None
    out: str = "data/${data.name}"
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_text("out", self.out)
        if self.data.name == "pydocs" and self.path is not None:
            raise ValueError(f"path={self.path} has no meaning for data=pydocs; leave it out")
        if self.data.name != "pydocs" and not self.path:
            raise ValueError(f"data={self.data.name} also needs path=FOLDER, where its raw files lie")


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


@dataclass(kw_only=True, slots=True)
class SearchBudget:
    """Settings of the walk that differ from those stored with the retriever (null: as stored).

    join: another retriever whose best join the last level: `bm25`, `dense` or an exported folder.
    """

    search: str | None = None
    budget: str | None = None
    keep: list[int] | None = None
    share: list[float] | None = None
    threshold: list[float] | None = None
    calibration: str | None = None
    scoring: str | None = None
    slate_size: int | None = None
    slate_tokens: int | None = None
    anchors: int | None = None
    slate_temperature: list[float] | None = None
    start_level: int | None = None
    join: str | None = None
    join_depth: int | None = None
    choose: int | None = None
    choose_orders: int | None = None
    answerable: bool | None = None
    path_weight: float | None = None
    expand: int | None = None
    max_tokens: int | None = None
    max_requests: int | None = None
    max_seconds: float | None = None
    price: PriceConfig = field(default_factory=PriceConfig)

    def over(self, stored: NavigateConfig) -> NavigateConfig:
        """`stored`, with every value that is set here instead of its own."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("join", "price")}
        own = {name: value for name, value in own.items() if value is not None}
        if self.price != PriceConfig():
            own["price"] = self.price
        if own.get("budget", "calibrated") != "calibrated":
            own["calibration"] = None
        return deepcopy(replace(stored, **own))


# Each setting means here what it means in the configuration that it changes.
SearchBudget.__doc__ = f"{SearchBudget.__doc__}{(NavigateConfig.__doc__ or '').partition('.')[2]}"


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """What is measured.

    name: a suite of `retrail.eval.suites`.
    metrics: names of measures instead of the suite's own, e.g. `nDCG@10`, `Hit@1`; the first is the headline.
    """

    name: str = "multidoc2dial"
    metrics: list[str] | None = None


@dataclass(kw_only=True, slots=True)
class EvalData:
    """The prepared folder to search.

    path: the folder.
    """

    path: str = required("data/multidoc2dial")


@dataclass(kw_only=True, slots=True)
class EvalRun(Command):
    """Search a prepared folder's queries and print measures, with controls beside them.

    retriever: an exported folder, or `bm25`.
    split: which queries (null: the suite's).
    k: how deep the rankings go (null: the suite's); must reach as deep as the measures do.
    limit: only a fixed sample of so many queries (null: all).
    baselines: controls in the same table: `bm25`, `dense` (MiniLM), `rerank` (the same model over the first 100 of
        BM25), `untrained` (the walk of the same model before training), `likelihood` (the first 100 of BM25, by how
        likely that untrained model finds the query after each), `flat` (all pages are judged, without levels above),
        `page_by_page` and `pointwise` (see `navigate.scoring`), `hybrid_bm25` and `hybrid_dense` (the first 20 of those
        join the last level).
    static: a folder of `retrail static` for this retriever and corpus; its slates are read no more (null: none).
    out: folder of runs and tables (null: `eval/SUITE` in the retriever's folder).
    """

    command: ClassVar[str] = "eval"

    retriever: str = required("export/d0")
    data: EvalData = field(default_factory=EvalData)
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    navigate: SearchBudget = field(default_factory=SearchBudget)
    split: str | None = None
    k: int | None = None
    limit: int | None = None
    baselines: list[str] = field(default_factory=lambda: ["bm25"])
    static: str | None = None
    out: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_positive("k", self.k)
        check_positive("limit", self.limit)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        for name in self.baselines:
            check_choice("baselines", name, BASELINES)


@dataclass(kw_only=True, slots=True)
class CalibrateRun(Command):
    """Fit budgets that keep the gold path with probability 1 - alpha, and measure them on queries held out.

    Search with them: `navigate.budget=calibrated navigate.calibration=FILE`.

    retriever: an exported folder.
    split: which labelled queries; not those of training, to which the model answers too well.
    alpha: the share of queries that may lose their gold path; smaller opens more candidates and needs more queries.
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
    sizes: how many candidates stand in one request.
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
    metrics: list[str] = field(default_factory=lambda: ["Hit@1", "Hit@5", "MRR"])
    limit: int | None = None
    out: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_positive("limit", self.limit)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        for name in self.negatives:
            check_choice("negatives", name, ("bm25", "dense", "splade"))
        if self.depth < 2 or not self.sizes or min(self.sizes) < 1 or not self.metrics or not self.negatives:
            raise ValueError(
                f"depth={self.depth} must be 2 or more, and sizes={self.sizes} (each 1 or more), metrics={self.metrics} "
                f"and negatives={self.negatives} must each name at least one"
            )


@dataclass(kw_only=True, slots=True)
class SearchRun(Command):
    """Answer one query, and show the walk that led there.

    retriever: an exported folder, or `bm25`.
    corpus: a prepared folder, or a corpus folder.
    query: the text to search for.
    k: how many results.
    show: `walk` shows every level as it goes, `hits` only the results, `json` one JSON object.
    static: a folder of `retrail static` for this retriever and corpus; its slates are read no more (null: none).
    """

    command: ClassVar[str] = "search"

    retriever: str = required("export/d0")
    corpus: str = required("data/pydocs")
    query: str = field(default=REQUIRED, metadata={"example": '"how do I copy a list?"', "text": True})
    k: int = 5
    show: str = "walk"
    static: str | None = None
    navigate: SearchBudget = field(default_factory=SearchBudget)
    device: str = "auto"

    def __post_init__(self) -> None:
        check_text("query", self.query)
        check_positive("k", self.k)
        check_choice("show", self.show, ("walk", "hits", "json"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))


@dataclass(kw_only=True, slots=True)
class WalksRun(Command):
    """Write what a retriever's own search judges for training queries: the slates of the next round of training.

    retriever: an exported folder.
    to: the file to write, for `retrail train objective.walks=[FILE]`.
    split: the split that gives the queries.
    limit: only a fixed sample of so many queries (null: all); each takes one search.
    depth: how many nodes of each level are kept at most, best first; the rest of a wide level is easy.
    """

    command: ClassVar[str] = "walks"

    retriever: str = required("export/d0")
    to: str = required("walks.jsonl")
    data: EvalData = field(default_factory=EvalData)
    navigate: SearchBudget = field(default_factory=SearchBudget)
    split: str = "train"
    limit: int | None = 1000
    depth: int = 100
    device: str = "auto"

    def __post_init__(self) -> None:
        check_text("to", self.to)
        check_positive("limit", self.limit)
        check_positive("depth", self.depth)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))


@dataclass(kw_only=True, slots=True)
class StaticRun(Command):
    """Read the upper levels of a corpus once, so that searches only read the queries there.

    It needs a retriever with decision.order=candidates_first. A level can be used where a search asks about all of it:
    keep navigate.keep as wide as the levels above.

    retriever: an exported folder.
    corpus: a prepared folder, or a corpus folder.
    to: the folder to write; one whose build was stopped goes on.
    levels: how many levels from the root; each is a choice of disk space, which is printed first.
    max_gb: so much at most, upper levels first (null: all of `levels`).
    """

    command: ClassVar[str] = "static"

    retriever: str = required("export/d0")
    corpus: str = required("data/pydocs")
    to: str = required("static/d0")
    levels: int = 2
    max_gb: float | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_text("to", self.to)
        check_positive("levels", self.levels)
        check_positive("max_gb", self.max_gb)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))


def check_text(key: str, value: str) -> None:
    """Raise ValueError that names the key if `value` is empty or blank."""
    if not value.strip():
        raise ValueError(f"{key}={value!r} must not be empty")
