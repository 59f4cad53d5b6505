"""A small tree with judged queries, a tiny decision model over it, and a prepared folder of both."""

from __future__ import annotations

from pathlib import Path

import torch

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.task import Qrels, Query, Task, write_task
from retrail.models.config import AdapterConfig, DecisionConfig, ModelConfig
from retrail.models.decision.build import build_decision
from retrail.models.decision.layout import SlateLayout
from retrail.models.decision.model import DecisionModel
from retrail.train.config import DecisionObjectiveConfig
from retrail.train.objectives.decision import DecisionObjective, gold_path_rows

WORDS = "apple bread cider dates eggs figs grapes honey ice jam kale lemon mango nuts olive pear".split()


def toy_corpus(pages: int = 4, sections: int = 4) -> Corpus:
    """Pages of sections; each section's title is a word of its own."""
    nodes = [Node(f"p{p}", None, f"Page {p}", f"About {p}.") for p in range(pages)]
    for p in range(pages):
        for s in range(sections):
            word = WORDS[(p * sections + s) % len(WORDS)]
            nodes.append(Node(f"p{p}s{s}", f"p{p}", word, f"{word} is on page {p}, number {s}."))
    return Corpus.from_nodes(nodes)


def toy_queries(corpus: Corpus) -> tuple[list[Query], Qrels]:
    """One query a leaf; every third one has a second right answer on the next page."""
    leaves = [int(row) for row in corpus.leaves()]
    queries = [Query(f"q{n}", f"where is {corpus.title(row)}?") for n, row in enumerate(leaves)]
    qrels = {f"q{n}": {corpus.id(row): 1} for n, row in enumerate(leaves)}
    for n in range(0, len(leaves), 3):
        qrels[f"q{n}"][corpus.id(leaves[(n + 5) % len(leaves)])] = 1
    return queries, qrels


def tiny_decision(
    head: str = "pointer", adapter: AdapterConfig | None = None, **decision: object
) -> tuple[DecisionModel, SlateLayout]:
    """The tiny model, the same each time."""
    settings = {"max_candidate_tokens": 24, "max_brief_tokens": 24, "max_query_tokens": 32, "min_label_mass": 0.0}
    config = DecisionConfig(head=head, **{**settings, **decision})  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_decision(ModelConfig(path="tiny:llama", dtype="float32"), config, torch.device("cpu"), adapter)


def shake(model: DecisionModel, scale: float = 0.1) -> DecisionModel:
    """The model with its trained parameters moved, so that an adapter or head that starts at nothing does something."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def toy_objective(layout: SlateLayout, *, seed: int = 0, **config: object) -> DecisionObjective:
    """The objective over the toy corpus."""
    corpus = toy_corpus()
    settings = {"min_candidates": 3, "max_candidates": 6, **config}
    return DecisionObjective(
        gold_path_rows(corpus, *toy_queries(corpus)),
        corpus,
        layout,
        DecisionObjectiveConfig(**settings),  # type: ignore[arg-type]
        seed=seed,
    )


def toy_task(path: Path, corpus: Corpus | None = None) -> Task:
    """A prepared folder with the splits train and dev."""
    corpus = toy_corpus() if corpus is None else corpus
    queries, qrels = toy_queries(corpus)
    splits = {}
    for name, part in (("train", queries[::2] + queries[1::4]), ("dev", queries[3::4] or queries[:1])):
        splits[name] = (part, {query.id: qrels[query.id] for query in part})
    return write_task(path, name="toy", corpus=corpus, splits=splits, source={})
