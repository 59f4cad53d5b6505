"""Settings of the commands that search."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from ..models.config import (
    NavigateConfig,
    PriceConfig,
    RecurseConfig,
    ServedOptions,
    check_choice,
    check_positive,
)
from .config_base import REQUIRED, Command, check_text, required

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
class RecurseBudget:
    """How a state encoder searches, where it differs from what is stored with it (null: as stored).

    index: a folder that keeps the vectors of the documents, or is to keep them (null: they are made anew).
    """

    strategy: str | None = None
    strategy_options: dict[str, Any] | None = None
    readout: str | None = None
    readout_options: dict[str, Any] | None = None
    candidate_k: int | None = None
    temperature: float | None = None
    batch_size: int | None = None
    inflight: int | None = None
    index_dtype: str | None = None
    index: str | None = None

    def over(self, stored: RecurseConfig) -> RecurseConfig:
        """`stored`, with every value that is set here; another search or readout brings its own options."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "index"}
        own = {name: value for name, value in own.items() if value is not None}
        for name in ("strategy", "readout"):
            if name in own and own[name] != getattr(stored, name):
                own.setdefault(f"{name}_options", {})
        return deepcopy(replace(stored, **own))


RecurseBudget.__doc__ = f"{RecurseBudget.__doc__}{(RecurseConfig.__doc__ or '').partition('.')[2]}"


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

    retriever: an exported folder, `bm25`, or `served:PROTOCOL:MODEL@URL`, the walk with a decision server.
    split: which queries (null: the suite's).
    k: how deep the rankings go (null: the suite's); must reach as deep as the measures do.
    limit: only a fixed sample of so many queries (null: all).
    baselines: controls in the same table: `bm25`, `dense` (MiniLM), `rerank` (the same model over the first 100 of
        BM25), `untrained` (the walk of the same model before training), `likelihood` (the first 100 of BM25, by how
        likely that untrained model finds the query after each), `flat` (all pages are judged, without levels above),
        `page_by_page` and `pointwise` (see `navigate.scoring`), `hybrid_bm25` and `hybrid_dense` (the first 20 of those
        join the last level).
    static: a folder of `retrail static` for this retriever and corpus; its slates are read no more (null: none).
    cache_gb: memory for slates that come back in later searches, which are then read no more (candidates first only).
    out: folder of runs and tables (null: `eval/SUITE` in the retriever's folder).
    """

    command: ClassVar[str] = "eval"

    retriever: str = required("export/d0")
    data: EvalData = field(default_factory=EvalData)
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    navigate: SearchBudget = field(default_factory=SearchBudget)
    recurse: RecurseBudget = field(default_factory=RecurseBudget)
    served: ServedOptions = field(default_factory=ServedOptions)
    split: str | None = None
    k: int | None = None
    limit: int | None = None
    baselines: list[str] = field(default_factory=lambda: ["bm25"])
    static: str | None = None
    cache_gb: float = 0.0
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

    retriever: an exported folder, `bm25`, or `served:PROTOCOL:MODEL@URL`, the walk with a decision server.
    corpus: a prepared folder, or a corpus folder.
    query: the text to search for.
    k: how many results.
    show: `walk` shows every level as it goes, `hits` only the results, `json` one JSON object.
    static: a folder of `retrail static` for this retriever and corpus; its slates are read no more (null: none).
    cache_gb: memory for slates that come back in later searches, which are then read no more (candidates first only).
    """

    command: ClassVar[str] = "search"

    retriever: str = required("export/d0")
    corpus: str = required("data/pydocs")
    query: str = field(default=REQUIRED, metadata={"example": '"how do I copy a list?"', "text": True})
    k: int = 5
    show: str = "walk"
    static: str | None = None
    cache_gb: float = 0.0
    navigate: SearchBudget = field(default_factory=SearchBudget)
    recurse: RecurseBudget = field(default_factory=RecurseBudget)
    served: ServedOptions = field(default_factory=ServedOptions)
    device: str = "auto"

    def __post_init__(self) -> None:
        check_text("query", self.query)
        check_positive("k", self.k)
        check_choice("show", self.show, ("walk", "hits", "json"))
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
class ServeRun(Command):
    """Answer decision requests with an exported model: /v1/systemone, /v1/decisions, /v1/rerank.

    retriever: an exported folder.
    name: the model's name in requests (null: that of the folder).
    host: address to listen at. There is no authentication: another one than this machine's own lets everyone in who
        reaches it.
    port: port to listen at (0: a free one).
    max_body_mb: longer requests are refused.
    max_batch_tokens: tokens of candidates that are answered together; more fills a GPU better, and lets a request wait
        longer for its neighbours.
    max_waiting: requests that may wait; those beyond are told to come back (503).
    """

    command: ClassVar[str] = "serve"

    retriever: str = required("export/d0")
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_mb: float = 4.0
    max_batch_tokens: int = 32_768
    max_waiting: int = 512
    device: str = "auto"

    def __post_init__(self) -> None:
        check_text("host", self.host)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        for key in ("max_body_mb", "max_batch_tokens", "max_waiting"):
            check_positive(key, getattr(self, key))
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port={self.port} must be between 0 and 65535")
