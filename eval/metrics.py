"""Rankings against judgements, on one canonical order that no provider can break differently.

trec_eval ignores ranks, sorts by score in float32 and breaks ties by descending document id; other tools break
them otherwise, so one run has several MRRs (ir_measures issue 18). Here a run is ranked once, by score and a
stated tie policy, and what ir-measures is given is minus the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from ..data_prep.hits import Hits
from ..models.config import check_choice

Qrels = Mapping[str, Mapping[str, int]]
PerQuery = dict[str, dict[str, float]]

DEFAULT_METRICS = ("Hit@1", "Hit@5", "Hit@10", "Recall@10", "MRR@10", "nDCG@10")
_NAME = re.compile(r"(Hit|Recall|R_cap|All|P|MRR|MAP|nDCG)(?:@([1-9][0-9]*))?")
_UNCUT = ("MRR", "MAP", "nDCG")
TIES = ("rank", "trec", "best", "worst")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """What differs between published evaluations of the same run.

    ties: order of equal scores: `rank` as the retriever gave them; `trec` by descending id, as trec_eval does;
        `best` and `worst` relevant ones first and last, the two ends of what any tie-break can give. All but
        `rank` compare scores as float32, as trec_eval does.
    min_rel: the least judgement that counts as relevant for all but nDCG (TREC DL passages: 2).
    no_positives: queries without a relevant document are `exclude`d (trec_eval -c) or a `miss`, value 0
        (MultiDoc2Dial).
    drop_self: leave out a document whose id is the query's, before any cut-off (ArguAna, Quora). A retriever must
        then be asked for one more than the largest cut-off.
    """

    ties: str = "rank"
    min_rel: int = 1
    no_positives: str = "exclude"
    drop_self: bool = False

    def __post_init__(self) -> None:
        check_choice("ties", self.ties, TIES)
        check_choice("no_positives", self.no_positives, ("exclude", "miss"))
        if self.min_rel < 1:
            raise ValueError(f"min_rel={self.min_rel} must be 1 or more: 0 is the judgement for irrelevant documents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a mean hides.

    queries: in the mean. missing: of these, absent from the run (value 0). empty: of these, with no hit at all.
    without_positives: queries with no relevant document, in the mean or not as the conventions say.
    extra: queries of the run without judgements, left out. top10, unjudged_top10: (query, document) pairs in the
    first ten ranks of the queries in the mean, and those without a judgement.
    dangling: relevant (query, document) pairs whose document is not in the corpus, so that nobody can find it
    (None where the corpus was not given).
    """

    queries: int
    missing: int
    empty: int
    without_positives: int
    extra: int
    top10: int
    unjudged_top10: int
    dangling: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`values[metric]` is the mean over `counts.queries` queries of `per_query[metric][query id]`."""

    values: dict[str, float]
    per_query: PerQuery = field(repr=False)
    counts: Counts
    conventions: Conventions

    def as_dict(self) -> dict[str, Any]:
        """Means, counts and conventions as plain JSON values (no values of single queries)."""
        return {"values": dict(self.values), "counts": asdict(self.counts), "conventions": asdict(self.conventions)}


def evaluate(
    run: Mapping[str, Hits],
    qrels: Qrels,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    conventions: Conventions | None = None,
    queries: Iterable[str] | None = None,
    corpus: Container[str] | None = None,
) -> Evaluation:
    """Means and values of single queries; nothing given is changed.

    Metric names: `Hit@k` (any relevant document in the first k), `Recall@k` (share of the relevant documents
    found), `R_cap@k` (the same over min(relevant, k)), `All@k` (whether all relevant documents are found), `P@k`,
    `MRR@k`, `MAP@k`, `nDCG@k` (gain = judgement, discount log2(rank + 1); negative judgements gain 0); the last three
    also without a cut-off.

    Args:
        run: query id -> ranking. A query absent from it counts 0.
        qrels: query id -> document id -> judgement, an integer.
        metrics: names as above.
        conventions: ties, threshold and denominators; the defaults are those of `trec_eval -c`, but for ties.
        queries: the ids that were asked; those without any judgement then count as queries without positives.
        corpus: ids of all documents (anything with `in`), to count judgements that nobody can find.

    Raises:
        ValueError: an unknown metric, a judgement that is no integer, no query to average over, or a run that
            shares no query with the judgements (their ids differ).
    """
    rules = conventions or Conventions()
    parsed = {name: _parse(name) for name in metrics}
    if not parsed:
        raise ValueError("no metrics to compute; name at least one, such as 'Hit@1'")
    judged = {query: _judgements(query, rels) for query, rels in qrels.items()}
    asked = list(dict.fromkeys([*judged, *(queries or ())]))
    if run and not any(query in run for query in asked):
        raise ValueError(
            f"no query of the run (such as {next(iter(run))!r}) is among the {len(asked)} judged ones "
            f"(such as {next(iter(asked), None)!r}); do run and judgements belong together?"
        )
    relevant = {q: [d for d, rel in judged.get(q, {}).items() if rel >= rules.min_rel] for q in asked}
    counted = [q for q in asked if relevant[q] or rules.no_positives == "miss"]
    if not counted:
        raise ValueError(f"none of the {len(asked)} judged queries has a relevant document; nothing to average")
    ranked = {q: _ranking(q, run[q], judged.get(q, {}), rules) for q in counted if q in run}
    positive = [q for q in counted if relevant[q]]
    measured = _measure(parsed, ranked, {q: judged[q] for q in positive}, rules.min_rel)
    per_query = {name: {q: values.get(q, 0.0) for q in counted} for name, values in measured.items()}
    counts = Counts(
        queries=len(counted),
        missing=sum(q not in run for q in counted),
        empty=sum(not ids for ids in ranked.values()),
        without_positives=sum(not relevant[q] for q in asked),
        extra=len(run.keys() - set(asked)),
        top10=sum(len(ids[:10]) for ids in ranked.values()),
        unjudged_top10=sum(d not in judged.get(q, {}) for q, ids in ranked.items() for d in ids[:10]),
        dangling=None if corpus is None else sum(d not in corpus for docs in relevant.values() for d in docs),
    )
    means = {name: math.fsum(values.values()) / len(counted) for name, values in per_query.items()}
    return Evaluation(values=means, per_query=per_query, counts=counts, conventions=rules)


def to_documents(hits: Hits, group_of: Mapping[str, str] | Callable[[str], str]) -> Hits:
    """The ranking of the groups (documents) of ranked passages: each scores as its best passage, once.

    Raises:
        ValueError: a mapping has no group for a passage.
    """
    best: dict[str, float] = {}
    for passage, score in zip(hits.ids, hits.scores, strict=True):
        best.setdefault(_group(passage, group_of), score)
    return Hits(tuple(best), tuple(best.values()), hits.cost, hits.trace)


def qrels_to_documents(qrels: Qrels, group_of: Mapping[str, str] | Callable[[str], str]) -> dict[str, dict[str, int]]:
    """Judgements of the groups (documents) of judged passages: each is as relevant as its best passage."""
    grouped: dict[str, dict[str, int]] = {}
    for query, rels in qrels.items():
        documents = grouped.setdefault(query, {})
        for passage, rel in rels.items():
            document = _group(passage, group_of)
            documents[document] = max(rel, documents.get(document, rel))
    return grouped


def check_metrics(metrics: Iterable[str]) -> None:
    """Raise ValueError, as `evaluate` would, for a name that is no metric."""
    for name in metrics:
        _parse(name)


def _group(passage: str, group_of: Mapping[str, str] | Callable[[str], str]) -> str:
    if not isinstance(group_of, Mapping):
        return group_of(passage)
    if passage not in group_of:
        raise ValueError(f"passage {passage!r} belongs to no document of the mapping")
    return group_of[passage]


def _parse(name: str) -> tuple[str, int | None]:
    match = _NAME.fullmatch(name)
    if match is None or (match[2] is None and match[1] not in _UNCUT):
        raise ValueError(
            f"{name!r} is not a metric; use Hit@k, Recall@k, R_cap@k, All@k, P@k, MRR@k, MAP@k, nDCG@k with a whole "
            f"number k, or MRR, MAP, nDCG"
        )
    return match[1], None if match[2] is None else int(match[2])


def _judgements(query: str, rels: Mapping[str, int]) -> dict[str, int]:
    """A copy in plain integers: providers refuse NumPy ones."""
    copy = {}
    for document, rel in rels.items():
        if not isinstance(rel, int | float | np.number) or not float(rel).is_integer():
            raise ValueError(f"judgement of query {query!r}, document {document!r} is {rel!r}, not an integer")
        copy[document] = int(rel)
    return copy


def _ranking(query: str, hits: Hits, rels: Mapping[str, int], rules: Conventions) -> list[str]:
    """Document ids, best first, ties broken as the rules say."""
    ids = [document for document in hits.ids if not (rules.drop_self and document == query)]
    if rules.ties == "rank":
        return ids
    with np.errstate(over="ignore"):
        score = dict(zip(hits.ids, np.array(hits.scores, dtype=np.float64).astype(np.float32).tolist(), strict=True))
    if rules.ties == "trec":
        return sorted(ids, key=lambda document: (score[document], document), reverse=True)
    sign = -1 if rules.ties == "best" else 1
    return sorted(ids, key=lambda document: (-score[document], sign * rels.get(document, 0)))


def _measure(
    parsed: Mapping[str, tuple[str, int | None]],
    ranked: Mapping[str, Sequence[str]],
    judged: Mapping[str, dict[str, int]],
    min_rel: int,
) -> PerQuery:
    """Values by metric and query from ir-measures, for queries that are ranked and have positives."""
    run = {q: {d: -float(i) for i, d in enumerate(ids, 1)} for q, ids in ranked.items() if ids and q in judged}
    result: PerQuery = {name: {} for name in parsed}
    if not run:
        return result
    import ir_measures

    measures = {name: _measure_of(*parts, min_rel) for name, parts in parsed.items()}
    names: dict[Any, list[str]] = {}
    for name, measure in measures.items():
        names.setdefault(measure, []).append(name)
    evaluator = ir_measures.evaluator(list(names), {q: judged[q] for q in run})
    for metric in evaluator.iter_calc(run):
        for name in names[metric.measure]:
            result[name][metric.query_id] = float(metric.value)
    for name, (kind, cut) in parsed.items():
        if kind == "R_cap" and cut is not None:
            for query, value in result[name].items():
                positives = sum(rel >= min_rel for rel in judged[query].values())
                result[name][query] = value * positives / min(positives, cut)
        elif kind == "All":
            result[name] = {query: float(value == 1.0) for query, value in result[name].items()}
    return result


def _measure_of(kind: str, cut: int | None, min_rel: int) -> Any:
    """The measure of ir-measures with that name."""
    import ir_measures

    if kind == "nDCG":
        measure = ir_measures.nDCG
    else:
        names = {"Hit": "Success", "Recall": "R", "R_cap": "R", "All": "R", "P": "P", "MRR": "RR", "MAP": "AP"}
        measure = getattr(ir_measures, names[kind])(rel=min_rel)
    return measure if cut is None else measure @ cut


def describe_conventions(conventions: Conventions) -> str:
    """The settings that differ from the defaults, for a table's footnote; empty where none does."""
    default = Conventions()
    differing = [f.name for f in fields(conventions) if getattr(conventions, f.name) != getattr(default, f.name)]
    return ", ".join(f"{name}={getattr(conventions, name)}" for name in differing)
