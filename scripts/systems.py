"""Retrievers by the names that commands know: an exported folder, and the controls beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .config import SearchBudget

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus
    from ..models.decision.navigate import Navigator
    from ..models.protocols import Retriever


def open_retriever(
    name: str, corpus: Corpus, budget: SearchBudget, device: str, static: str | None = None
) -> tuple[Retriever, str]:
    """The retriever of that name over `corpus`, and a description that changes with the model and its settings.

    name: `bm25`, `dense`, or an exported folder.
    static: a folder of `retrail static` (exported folders only).

    Raises:
        ValueError: `static` with a retriever that reads no slates.
    """
    if name in ("bm25", "dense"):
        if static is not None:
            raise ValueError(f"static={static} has no meaning for retriever={name}; leave it out")
        return next(controls([name], corpus))[1:]
    from ..models.load import RETRIEVAL, load, read_export

    config = budget.over(read_export(name).navigate)
    navigator = load(name, corpus, device=device, navigate=config, static=static)
    budgets = f"keep={config.keep} choose={config.choose} path_weight={config.path_weight}"
    # The same answers within rounding, but not the same cost.
    stored = " static" if static is not None else ""
    return navigator, f"navigation {budgets} {file_hash(Path(name) / RETRIEVAL)}{stored}"


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
