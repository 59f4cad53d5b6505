"""Retrievers by the names that commands know: an exported folder, and the controls beside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import RecurseBudget, SearchBudget

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus
    from ..models.config import DecisionConfig, ModelConfig, NavigateConfig, ServedOptions
    from ..models.decision.likelihood import LikelihoodScorer
    from ..models.decision.navigate import Navigator
    from ..models.protocols import DecisionScorer, Retriever


SERVED, GENERATIVE = "served:", "generative:"


def open_retriever(
    name: str,
    corpus: Corpus,
    budget: SearchBudget,
    device: str,
    static: str | None = None,
    cache_gb: float = 0.0,
    served: ServedOptions | None = None,
    recurse: RecurseBudget | None = None,
) -> tuple[Retriever, str]:
    """The retriever of that name over `corpus`, and a description that changes with the model and its settings.

    name: `bm25`, `dense`, an exported folder, `served:PROTOCOL:MODEL@URL`, which is asked as `served` says, or
        `generative:LM`, a walk in which a language model writes the numbers of the candidates to keep.
    budget, static (a folder of `retrail static`), cache_gb (memory for slates that come back): of decision models;
        recurse: of state encoders.

    Raises:
        ValueError: settings of one family with a retriever of the other, or `static` where no slates are read.
    """
    if name in ("bm25", "dense"):
        if static is not None:
            raise ValueError(f"static={static} has no meaning for retriever={name}; leave it out")
        return next(controls([name], corpus))[1:]
    if not name.startswith((SERVED, GENERATIVE)) and _family(name) == "recursive":
        return _recursive(name, corpus, budget, device, recurse or RecurseBudget())
    from ..models.config import NavigateConfig
    from ..models.decision.navigate import Navigator
    from ..models.exports import RETRIEVAL, read_export
    from ..models.load import load_scorer

    join, joined = open_retriever(budget.join, corpus, SearchBudget(), device) if budget.join else (None, "")
    if name.startswith((SERVED, GENERATIVE)):
        if static is not None:
            raise ValueError(f"static={static} has no meaning for retriever={name}; leave it out")
        config = budget.over(NavigateConfig())
        scorer, what = _served(name, served) if name.startswith(SERVED) else _generative(name, device)
        _note_calibration(config, what, corpus)
        navigator = Navigator(scorer, corpus, config, join=join)
    else:
        config, what = budget.over(read_export(name).navigate), file_hash(Path(name) / RETRIEVAL)
        _note_calibration(config, what, corpus)
        kept = int(cache_gb * 1e9)
        store = None
        if static is not None:  # before the weights, which take long to load
            from ..models.decision.static import StaticSlates

            store = StaticSlates.open(static)
            store.check_corpus(corpus)
        local = load_scorer(name, device=device, static=store, trunk_cache_bytes=kept)
        navigator = Navigator(local, corpus, config, join=join)
    # With stored slates the answers are the same within rounding, but not the cost.
    parts = ["navigation", settings_text(config), what, "static" if static else "", joined and f"with {joined}"]
    return navigator, " ".join(filter(None, parts))


def _family(name: str) -> str:
    from ..models.exports import read_export

    return read_export(name).family


def _recursive(
    name: str, corpus: Corpus, budget: SearchBudget, device: str, recurse: RecurseBudget
) -> tuple[Retriever, str]:
    """The recursive search of an exported state encoder."""
    from ..models.exports import RETRIEVAL, read_export
    from ..models.load import load
    from ..models.recursive.retriever import RecursiveRetriever

    if budget != SearchBudget():
        raise ValueError(f"retriever={name} is a state encoder, which has no navigate.* settings; use recurse.*")
    config = recurse.over(read_export(name).recurse)
    retriever = load(name, corpus, device=device, recurse=config, index=recurse.index)
    assert isinstance(retriever, RecursiveRetriever)
    facts = json.dumps(asdict(config), sort_keys=True)
    return retriever, f"recursive {facts} {file_hash(Path(name) / RETRIEVAL)} {corpus.fingerprint}"


def _note_calibration(config: NavigateConfig, retriever: str, corpus: Corpus) -> None:
    """Say where a calibration is used on another corpus; one of another model is an error."""
    from ..models.decision.calibration import check_calibration

    if config.budget == "calibrated":
        for note in check_calibration(str(config.calibration), retriever=retriever, corpus=corpus.fingerprint):
            print(f"note: {note}", file=sys.stderr)


def _generative(name: str, device: str) -> tuple[DecisionScorer, str]:
    """The scorer of `generative:LM`, and what its answers depend on."""
    from ..models.decision.generative import GenerativeScorer
    from ..models.lm import open_language_model
    from ..models.prompts import GENERATIVE_PROMPT, prompt_hash

    model = open_language_model(name.removeprefix(GENERATIVE), device=device)
    return GenerativeScorer(model), f"generative {prompt_hash(GENERATIVE_PROMPT)[:16]} {model.description}"


def settings_text(config: NavigateConfig) -> str:
    """The settings that matter for what is found, as one line that is equal for equal ones."""
    from ..models.decision.calibration import calibration_hash

    settings = asdict(config) | {"calibration": calibration_hash(config.calibration) if config.calibration else None}
    return json.dumps({key: value for key, value in settings.items() if key != "price"}, sort_keys=True)


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
            raise ValueError(f"baselines=[{name}] needs a decision model: retriever=EXPORTED_FOLDER of one")
        elif name == "untrained":
            if folder.startswith((SERVED, GENERATIVE)):
                raise ValueError("baselines=[untrained] needs an exported folder, which tells its base model")
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
            yield f"navigation, {name.replace('_', ' with ')}", changed(navigator, join=other), f"{name} {model}"
        else:
            yield (
                f"navigation, {name.replace('_', ' ')}",
                changed(navigator, **VARIANTS[name](corpus)),
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


def changed(navigator: Navigator, *, join: Retriever | None = None, **changes: Any) -> Navigator:
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
    from ..models.exports import read_export

    manifest = read_export(folder).manifest
    return ModelConfig(**manifest["training"]["model"]), DecisionConfig(**manifest["contract"]["decision"])


def file_hash(path: Path) -> str:
    """The beginning of the sha256 of a file."""
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
