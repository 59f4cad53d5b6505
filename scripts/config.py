"""Typed settings of each command. Imports no torch, so that a typo fails at once.

`???` marks a value that the user has to give; the `example` beside it is shown when it is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from ..models.config import AdapterConfig, DecisionConfig, ModelConfig, NavigateConfig, check_choice, check_positive
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

    path: the folder.
    split: the split that gives training queries.
    """

    path: str = required("data/multidoc2dial")
    split: str = "train"


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


BASELINES = ("bm25", "dense", "rerank", "untrained")
READER_OPTIONS = {
    "pydocs": (),
    "multidoc2dial": ("documents", "dialogues", "split_by", "segmentation", "words", "domain_level", "skip_missing"),
    "beir": ("splits", "skip_empty", "allow_dangling"),
    "conditionalqa": ("documents", "splits"),
    "markdown": ("queries", "qrels"),
    "html": ("queries", "qrels"),
    "tree": ("groups", "balanced", "branching", "encoder", "seed"),
    "update": ("add", "remove"),
}


@dataclass(kw_only=True, slots=True)
class PrepData:
    """Which reader, and its options.

    name: the reader.
    documents: (multidoc2dial, conditionalqa) file of the documents in `path` (null: the one named
        `*doc2dial_doc*.json`, for conditionalqa `documents.json`; also gzipped).
    dialogues: (multidoc2dial) files of the dialogues in `path` (null: all named `*doc2dial_dial_*.json`, also gzipped).
    split_by: (multidoc2dial) `files` takes each file of dialogues as the split in its name, `hash` divides dialogues
        by their ids into train (8 of 10 buckets) and dev (1 of 10), `auto` does the second if there is only one file.
    segmentation: (multidoc2dial) passages are sections (`structure`) or runs of `words` words (`token`).
    words: (multidoc2dial) words of a `token` passage; fewer makes passages more precise and the tree wider.
    domain_level: (multidoc2dial) whether domains are the root level, above the documents.
    skip_missing: (multidoc2dial) leave out turns that are grounded in a document that is not there, instead of
        stopping.
    splits: (beir) which files of `qrels/` to take (null: all); (conditionalqa) of train, dev, test (null: the first
        two; test has no evidences).
    skip_empty: (beir) leave out documents without title and text, instead of stopping.
    allow_dangling: (beir) keep judgements of documents that the corpus lacks, instead of stopping; nobody can find
        them.
    queries: (markdown, html) file of queries in `path`, as BEIR's `queries.jsonl`; null: only a corpus is written.
    qrels: (markdown, html) file of their judgements in `path`, as in BEIR.
    groups: (tree) how many k-means groups to put above the pages; more makes each smaller and the first level wider.
    balanced: (tree) groups differ in size by at most one.
    branching: (tree) instead of groups, as many levels as it takes with so many children a node.
    encoder: (tree) a sentence-transformers model for title and first sentence, as of the dense baseline.
    seed: (tree) of k-means.
    add: (update) JSON Lines file of pages to put in: `_id`, `title`, `text`, `parent` for what is below a page.
    remove: (update) ids of pages to take out, before any are put in.
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
    queries: str | None = None
    qrels: str | None = None
    groups: int | None = None
    balanced: bool = False
    branching: int | None = None
    encoder: str = "package:minilm"
    seed: int = 0
    add: str | None = None
    remove: list[str] | None = None

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, tuple(READER_OPTIONS))
        check_choice("data.split_by", self.split_by, ("auto", "files", "hash"))
        check_choice("data.segmentation", self.segmentation, ("structure", "token"))
        check_positive("data.words", self.words)
        for option in fields(self)[1:]:
            if option.name not in READER_OPTIONS[self.name] and getattr(self, option.name) != option.default:
                raise ValueError(f"data.{option.name} has no meaning for data={self.name}; leave it out")
        self._check_tree()

    def _check_tree(self) -> None:
        check_positive("data.groups", self.groups)
        if self.branching is not None and self.branching < 2:
            raise ValueError(f"data.branching={self.branching} must be 2 or more")
        if self.name == "tree" and (self.groups is None) == (self.branching is None):
            raise ValueError("data=tree needs either data.groups=N or data.branching=N")
        if self.balanced and self.branching is not None:
            raise ValueError("data.balanced belongs to data.groups; data.branching is always balanced")
        if self.name == "update" and not (self.add or self.remove):
            raise ValueError("data=update needs data.add=FILE.jsonl or data.remove=[ID, ...]")


@dataclass(kw_only=True, slots=True)
class PrepRun(Command):
    """Read a data set in its published format and write a prepared folder: corpus, queries, judgements.

    path: folder of the raw data, or the prepared folder that `tree` and `update` start from (not for `pydocs`, which
        is on every machine).
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
    """Budgets of the walk that differ from those stored with the retriever (null: as stored).

    keep: how many candidates stay at each level; more keeps the answer more often and costs more requests.
    choose: how many of the best go to the final multiple-choice request (0: none).
    path_weight: how much the log-odds above a candidate count beside its own (0: not at all).
    """

    keep: list[int] | None = None
    choose: int | None = None
    path_weight: float | None = None

    def over(self, stored: NavigateConfig) -> NavigateConfig:
        """`stored`, with every value that is set here instead of its own."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        changed = replace(stored, **own)
        return replace(changed, keep=list(changed.keep))


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
        BM25), `untrained` (the walk of the same model before training).
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
    out: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_positive("k", self.k)
        check_positive("limit", self.limit)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        for name in self.baselines:
            check_choice("baselines", name, BASELINES)


@dataclass(kw_only=True, slots=True)
class SearchRun(Command):
    """Answer one query, and show the walk that led there.

    retriever: an exported folder, or `bm25`.
    corpus: a prepared folder, or a corpus folder.
    query: the text to search for.
    k: how many results.
    show: `walk` shows every level as it goes, `hits` only the results, `json` one JSON object.
    """

    command: ClassVar[str] = "search"

    retriever: str = required("export/d0")
    corpus: str = required("data/pydocs")
    query: str = field(default=REQUIRED, metadata={"example": '"how do I copy a list?"', "text": True})
    k: int = 5
    show: str = "walk"
    navigate: SearchBudget = field(default_factory=SearchBudget)
    device: str = "auto"

    def __post_init__(self) -> None:
        check_text("query", self.query)
        check_positive("k", self.k)
        check_choice("show", self.show, ("walk", "hits", "json"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))


def check_text(key: str, value: str) -> None:
    """Raise ValueError that names the key if `value` is empty or blank."""
    if not value.strip():
        raise ValueError(f"{key}={value!r} must not be empty")
