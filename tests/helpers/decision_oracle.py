"""A scorer that knows how hard each question is, on made trees: what budgets are tried on."""

from __future__ import annotations

import hashlib

import numpy as np
from fakes import FakeScorer

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.task import Query


def made_tree(*widths: int) -> Corpus:
    """`widths[0]` roots with `widths[1]` children each, and so on; ids are paths such as "3/0/7"."""
    ids, level = [], [""]
    for width in widths:
        level = [f"{above}/{n}".lstrip("/") for above in level for n in range(width)]
        ids += level
    return Corpus.from_nodes(Node(i, i.rpartition("/")[0] or None, f"title {i}", f"text {i}") for i in ids)


def made_queries(corpus: Corpus, count: int) -> tuple[list[Query], dict[str, dict[str, int]]]:
    """Queries, the n-th of which is answered by a leaf drawn at random."""
    rng, leaves = np.random.default_rng(0), corpus.leaves()
    gold = {f"q{n}": corpus.id(int(rng.choice(leaves))) for n in range(count)}
    return [Query(q, f"{q} {leaf}") for q, leaf in gold.items()], {q: {leaf: 1} for q, leaf in gold.items()}


def oracle(seed: int = 0, easy: float = 4.0) -> FakeScorer:
    """Believes the log-odds of a normal variable that is shifted for gold nodes, in some queries more than in others.

    The query's text ends with the id of its gold leaf. The same seed gives the same beliefs, whatever is asked first.
    """

    def believe(query: str, candidate) -> float:
        name, _, gold = query.partition(" ")
        shift = easy * _uniform(seed, name)
        is_gold = gold == candidate.id or gold.startswith(candidate.id + "/")
        x = shift * is_gold + _normal(seed, name, candidate.id)
        return float(1 / (1 + np.exp(3 - shift * x + shift * shift / 2)))

    return FakeScorer(believe)


def _uniform(*key: object) -> float:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64


def _normal(*key: object) -> float:
    a, b = _uniform(*key, "a"), _uniform(*key, "b")
    return float(np.sqrt(-2 * np.log(a + 1e-300)) * np.cos(2 * np.pi * b))
