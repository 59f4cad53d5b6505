"""Retrievers by the names that commands know: an exported folder, and the controls beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .config import SearchBudget

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus
    from ..models.config import ServedOptions
    from ..models.decision.navigate import Navigator
    from ..models.protocols import DecisionScorer, Retriever


SERVED = "served:"


def open_retriever(
    name: str, corpus: Corpus, budget: SearchBudget, device: str, served: ServedOptions | None = None
) -> tuple[Retriever, str]:
    """The retriever of that name over `corpus`, and a description that changes with the model and its settings.

    name: `bm25`, `dense`, an exported folder, or `served:PROTOCOL:MODEL@URL`, which is asked as `served` says.
    """
    if name in ("bm25", "dense"):
        return next(controls([name], corpus))[1:]
    from ..models.config import NavigateConfig
    from ..models.decision.navigate import Navigator
    from ..models.load import RETRIEVAL, load_scorer, read_export

    scorer: DecisionScorer
    if name.startswith(SERVED):
        config = budget.over(NavigateConfig())
        scorer, what = _served(name, served)
    else:
        export = read_export(name)
        config, what = budget.over(export.navigate), file_hash(Path(name) / RETRIEVAL)
        scorer = load_scorer(name, device=device)
    budgets = f"keep={config.keep} choose={config.choose} path_weight={config.path_weight}"
    return Navigator(scorer, corpus, config), f"navigation {budgets} {what}"


def _served(name: str, options: ServedOptions | None) -> tuple[DecisionScorer, str]:
    """The scorer of `served:PROTOCOL:MODEL@URL`, and what its answers depend on."""
    from ..models.decision.served import ServedScorer

    protocol, _, rest = name.removeprefix(SERVED).partition(":")
    model, _, url = rest.partition("@http")
    if not (protocol and model and url):
        raise ValueError(
            f"retriever={name} must be served:PROTOCOL:MODEL@URL, e.g. served:systemone:d0@http://127.0.0.1:8000"
        )
    scorer = ServedScorer(f"http{url}", model, protocol, options)
    limits = {f: getattr(scorer.options, f) for f in _LIMITS}
    return scorer, f"{scorer!r} {limits}"


_LIMITS = ("max_candidates", "max_slate_tokens", "max_candidate_chars", "max_brief_chars")


def controls(
    names: Sequence[str], corpus: Corpus, navigator: Navigator | None = None, folder: str = "", model: str = ""
) -> Iterator[tuple[str, Retriever, str]]:
    """(title, retriever, description) of each control.

    `rerank` reads BM25's first 100 with the navigator's scorer; `untrained` walks as the navigator does, with the base
    model of its exported `folder`. Both need a navigator, which `model` describes.

    Raises:
        ValueError: one of these without a navigator.
    """
    from ..models.bm25 import BM25

    bm25 = BM25.from_corpus(corpus) if {"bm25", "rerank"} & set(names) else None
    for name in names:
        if name == "bm25":
            assert bm25 is not None
            yield "BM25", bm25, bm25.description
        elif name == "dense":
            from ..eval.dense import DenseRetriever

            dense = DenseRetriever.from_corpus(corpus)
            yield "MiniLM", dense, dense.description
        elif navigator is None:
            raise ValueError(f"baselines=[{name}] needs a decision model: retriever=EXPORTED_FOLDER")
        elif name == "untrained":
            if folder.startswith(SERVED):
                raise ValueError(
                    "baselines=[untrained] needs an exported folder; a server does not tell its base model"
                )
            yield "navigation, untrained", _untrained(folder, navigator), f"untrained {model}"
        else:
            from ..models.decision.rerank import Reranker

            assert bm25 is not None
            yield "rerank BM25's 100", Reranker(navigator.scorer, corpus, bm25, depth=100), f"rerank 100 {model}"


def _untrained(folder: str, navigator: Navigator) -> Navigator:
    from ..models.config import DecisionConfig, ModelConfig
    from ..models.decision.build import build_decision
    from ..models.decision.navigate import Navigator
    from ..models.decision.scorer import LocalScorer
    from ..models.load import read_export

    manifest = read_export(folder).manifest
    model, decision = ModelConfig(**manifest["training"]["model"]), DecisionConfig(**manifest["contract"]["decision"])
    scorer: LocalScorer = navigator.scorer  # type: ignore[assignment]
    network, layout = build_decision(model, decision, scorer.model.device)
    return Navigator(LocalScorer(network, layout), navigator.corpus, navigator.config)


def file_hash(path: Path) -> str:
    """The beginning of the sha256 of a file."""
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
