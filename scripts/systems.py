"""Retrievers by the names that commands know: an exported folder, and the controls beside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import SearchBudget

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus
    from ..models.config import DecisionConfig, ModelConfig, NavigateConfig
    from ..models.decision.likelihood import LikelihoodScorer
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
    from ..models.decision.calibration import check_calibration
    from ..models.load import RETRIEVAL, load, read_export

    config = budget.over(read_export(name).navigate)
    fingerprint = file_hash(Path(name) / RETRIEVAL)
    if config.budget == "calibrated":
        for note in check_calibration(str(config.calibration), retriever=fingerprint, corpus=corpus.fingerprint):
            print(f"note: {note}", file=sys.stderr)
    join, joined = open_retriever(budget.join, corpus, SearchBudget(), device) if budget.join else (None, "")
    navigator = load(name, corpus, device=device, navigate=config, static=static, join=join)
    # With stored slates the answers are the same within rounding, but not the cost.
    parts = ["navigation", settings_text(config), fingerprint, "static" if static else "", joined and f"with {joined}"]
    return navigator, " ".join(filter(None, parts))


def settings_text(config: NavigateConfig) -> str:
    """The settings that matter for what is found, as one line that is equal for equal ones."""
    from ..models.decision.calibration import calibration_hash

    settings = asdict(config) | {"calibration": calibration_hash(config.calibration) if config.calibration else None}
    return json.dumps({key: value for key, value in settings.items() if key != "price"}, sort_keys=True)


def controls(
    names: Sequence[str], corpus: Corpus, navigator: Navigator | None = None, folder: str = "", model: str = ""
) -> Iterator[tuple[str, Retriever, str]]:
    """(title, retriever, description) of each control.

    `rerank` reads BM25's first 100 with the navigator's scorer, `likelihood` with the query likelihood of the base
    model of its exported `folder`; `untrained` walks as the navigator does, with that base model; the others walk with
    one setting changed. All these need a navigator, which `model` describes.

    Raises:
        ValueError: one of these without a navigator.
    """
    first: dict[str, Retriever] = {}
    for name in names:
        if name in ("bm25", "dense"):
            retriever = _first(name, corpus, first)
            yield "BM25" if name == "bm25" else "MiniLM", retriever, retriever.description  # type: ignore[attr-defined]
        elif navigator is None:
            raise ValueError(f"baselines=[{name}] needs a decision model: retriever=EXPORTED_FOLDER")
        elif name == "untrained":
            yield "navigation, untrained", _untrained(folder, navigator), f"untrained {model}"
        elif name == "rerank":
            from ..models.decision.rerank import Reranker

            bm25 = _first("bm25", corpus, first)
            yield "rerank BM25's 100", Reranker(navigator.scorer, corpus, bm25, depth=100), f"rerank 100 {model}"
        elif name == "likelihood":
            from ..models.decision.rerank import Reranker

            # Nothing is chosen at the end: the choice would put the sums, which rank the same, in place of the means.
            scorer, bm25 = _likelihood(folder, navigator), _first("bm25", corpus, first)
            reranker = Reranker(scorer, corpus, bm25, depth=100, choose=0)
            yield "query likelihood on BM25's 100", reranker, f"likelihood 100 {model}"
        elif name.startswith("hybrid_"):
            other = _first(name.removeprefix("hybrid_"), corpus, first)
            yield f"navigation, {name.replace('_', ' with ')}", _changed(navigator, join=other), f"{name} {model}"
        else:
            yield (
                f"navigation, {name.replace('_', ' ')}",
                _changed(navigator, **VARIANTS[name](corpus)),
                f"{name} {model}",
            )


# Controls that walk with one setting changed. Flat: every parent of leaves is judged, nothing above.
VARIANTS: Mapping[str, Callable[[Corpus], dict[str, Any]]] = {
    "flat": lambda corpus: {"start_level": max(0, corpus.num_levels - 2)},
    "page_by_page": lambda corpus: {"scoring": "page_by_page"},
    "pointwise": lambda corpus: {"scoring": "pointwise"},
}


def _first(name: str, corpus: Corpus, opened: dict[str, Retriever]) -> Retriever:
    """BM25 or MiniLM over the corpus, opened once."""
    if name not in opened:
        if name == "bm25":
            from ..models.bm25 import BM25

            opened[name] = BM25.from_corpus(corpus)
        else:
            from ..eval.dense import DenseRetriever

            opened[name] = DenseRetriever.from_corpus(corpus)
    return opened[name]


def _changed(navigator: Navigator, *, join: Retriever | None = None, **changes: Any) -> Navigator:
    """The same walk with other settings."""
    from ..models.decision.navigate import Navigator

    config = replace(navigator.config, **changes)
    return Navigator(navigator.scorer, navigator.corpus, config, join=join or navigator.join)


def _untrained(folder: str, navigator: Navigator) -> Navigator:
    if navigator.config.budget == "calibrated":
        raise ValueError("baselines=[untrained] cannot walk with thresholds of the trained model; leave it out")
    from ..models.decision.build import build_decision
    from ..models.decision.navigate import Navigator
    from ..models.decision.scorer import LocalScorer

    scorer: LocalScorer = navigator.scorer  # type: ignore[assignment]
    network, layout = build_decision(*_base(folder), scorer.model.device)
    return Navigator(LocalScorer(network, layout), navigator.corpus, navigator.config, join=navigator.join)


def _likelihood(folder: str, navigator: Navigator) -> LikelihoodScorer:
    from ..models.backbone import load_backbone
    from ..models.decision.build import open_layout
    from ..models.decision.likelihood import LikelihoodScorer, QueryLikelihood
    from ..models.decision.scorer import LocalScorer

    scorer: LocalScorer = navigator.scorer  # type: ignore[assignment]
    model, decision = _base(folder)
    backbone, tokenizer = load_backbone(model, scorer.model.device)
    return LikelihoodScorer(QueryLikelihood(backbone, open_layout(tokenizer, decision, backbone)))


def _base(folder: str) -> tuple[ModelConfig, DecisionConfig]:
    """The model that an export was trained from, and how it reads slates."""
    from ..models.config import DecisionConfig, ModelConfig
    from ..models.load import read_export

    manifest = read_export(folder).manifest
    return ModelConfig(**manifest["training"]["model"]), DecisionConfig(**manifest["contract"]["decision"])


def file_hash(path: Path) -> str:
    """The beginning of the sha256 of a file."""
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
