"""Metrics against hand values, trec_eval's own code, and the inputs on which evaluation tools differ or fail."""

import copy
import math
import random

import numpy as np
import pytest
import pytrec_eval

from retrail.data_prep.hits import Cost, Hits
from retrail.eval.metrics import (
    Conventions,
    check_metrics,
    describe_conventions,
    evaluate,
    qrels_to_documents,
    to_documents,
)


def ranking(*ids: str) -> Hits:
    return Hits(ids, tuple(float(len(ids) - i) for i in range(len(ids))))


def tied(*ids: str) -> Hits:
    return Hits(ids, (1.0,) * len(ids))


def value(run: dict[str, Hits], qrels: dict, metric: str, **rules) -> float:
    return evaluate(run, qrels, [metric], conventions=Conventions(**rules)).values[metric]


def test_hand_values():
    # Relevant: b (rank 2), d (rank 4), z (never found); a is judged irrelevant.
    run = {"q": ranking("a", "b", "c", "d")}
    qrels = {"q": {"a": 0, "b": 1, "d": 2, "z": 1}}
    expected = {
        "Hit@1": 0,
        "Hit@2": 1,
        "Recall@1": 0,
        "Recall@3": 1 / 3,
        "Recall@10": 2 / 3,
        "R_cap@2": 1 / 2,
        "R_cap@10": 2 / 3,
        "P@4": 2 / 4,
        "MRR": 1 / 2,
        "MRR@1": 0,
        "MRR@2": 1 / 2,
        "MAP": (1 / 2 + 2 / 4) / 3,
        "MAP@2": (1 / 2) / 3,
        "nDCG@3": (1 / math.log2(3)) / (2 + 1 / math.log2(3) + 1 / math.log2(4)),
        "nDCG": (1 / math.log2(3) + 2 / math.log2(5)) / (2 + 1 / math.log2(3) + 1 / math.log2(4)),
    }
    result = evaluate(run, qrels, list(expected))
    assert result.values == pytest.approx(expected)
    assert result.per_query == {name: {"q": pytest.approx(number)} for name, number in expected.items()}


def test_recall_at_1_is_a_share():
    run = {"q": ranking("a", "b")}
    assert value(run, {"q": {"a": 1, "b": 1, "c": 1, "d": 1}}, "Recall@1") == pytest.approx(1 / 4)
    assert value(run, {"q": {"a": 1}}, "Recall@1") == 1


def test_the_mean_is_over_queries():
    run = {"q1": ranking("a"), "q2": ranking("x", "b"), "q3": ranking("x")}
    qrels = {"q1": {"a": 1}, "q2": {"b": 1}, "q3": {"c": 1}}
    result = evaluate(run, qrels, ["MRR@10", "Hit@1"])
    assert result.values == pytest.approx({"MRR@10": 1.5 / 3, "Hit@1": 1 / 3})
    assert result.per_query["MRR@10"] == {"q1": 1.0, "q2": 0.5, "q3": 0.0}


# --- agreement with trec_eval ------------------------------------------------------------------------------

TREC_NAMES = {
    "success_1": "Hit@1",
    "success_5": "Hit@5",
    "recall_5": "Recall@5",
    "recall_100": "Recall@100",
    "P_5": "P@5",
    "recip_rank": "MRR",
    "map": "MAP",
    "map_cut_10": "MAP@10",
    "ndcg": "nDCG",
    "ndcg_cut_10": "nDCG@10",
}


def random_case(seed: int, with_ties: bool) -> tuple[dict[str, Hits], dict[str, dict[str, int]]]:
    rng = random.Random(seed)
    documents = [f"d{i}" for i in range(rng.choice([5, 40]))]
    run, qrels = {}, {}
    for query in (f"q{i}" for i in range(rng.randint(1, 12))):
        ids = rng.sample(documents, rng.randint(0, len(documents)))
        if with_ties:
            # 1 + 1e-9 and 1 are one number in float32, which is what trec_eval compares
            scores = sorted((rng.choice([0.0, 0.5, 1.0, 1.0 + 1e-9, 2.0]) for _ in ids), reverse=True)
        else:
            scores = sorted((rng.random() for _ in ids), reverse=True)
        if rng.random() < 0.85:
            run[query] = Hits(tuple(ids), tuple(scores))
        judged = rng.sample(documents, rng.randint(1, len(documents)))
        qrels[query] = {document: rng.choice([-1, 0, 0, 1, 1, 2, 3]) for document in judged}
    qrels["q0"][documents[0]] = 3
    return run, qrels


@pytest.mark.parametrize("min_rel", [1, 2])
@pytest.mark.parametrize("with_ties", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_agrees_with_trec_eval(seed, with_ties, min_rel):
    run, qrels = random_case(seed, with_ties)
    if not run:
        run = {"q0": ranking("d1")}
    ours = evaluate(run, qrels, list(TREC_NAMES.values()), conventions=Conventions(ties="trec", min_rel=min_rel))
    clean = {q: {d: max(rel, 0) for d, rel in rels.items()} for q, rels in qrels.items()}
    evaluator = pytrec_eval.RelevanceEvaluator(clean, list(TREC_NAMES), relevance_level=min_rel)
    theirs = evaluator.evaluate({q: dict(zip(h.ids, h.scores, strict=True)) for q, h in run.items()})
    counted = [q for q, rels in qrels.items() if any(rel >= min_rel for rel in rels.values())]
    assert ours.counts.queries == len(counted)
    for theirs_name, name in TREC_NAMES.items():
        expected = {q: theirs.get(q, {}).get(theirs_name, 0.0) for q in counted}
        assert ours.per_query[name] == pytest.approx(expected, abs=1e-12), name
        assert ours.values[name] == pytest.approx(sum(expected.values()) / len(counted))


@pytest.mark.parametrize("seed", range(25))
def test_cut_mrr_and_capped_recall_equal_a_direct_count(seed):
    run, qrels = random_case(seed, True)
    if not run:
        run = {"q0": ranking("d1")}
    ours = evaluate(run, qrels, ["MRR@3", "R_cap@3", "Hit@3", "Recall@3", "All@3"])
    for query, got in ours.per_query["MRR@3"].items():
        gold = {d for d, rel in qrels[query].items() if rel >= 1}
        ids = run[query].ids if query in run else ()
        ranks = [rank for rank, d in enumerate(ids[:3], 1) if d in gold]
        assert got == pytest.approx(1 / ranks[0] if ranks else 0)
        assert ours.per_query["R_cap@3"][query] == pytest.approx(len(ranks) / min(len(gold), 3))
        # RDR's recall over gold groups, |{G: G meets the top k}| / |groups|, with groups of one document.
        met = [group for group in ({d} for d in gold) if group & set(ids[:3])]
        assert ours.per_query["Recall@3"][query] == pytest.approx(len(met) / len(gold))
        assert ours.per_query["All@3"][query] == (len(met) == len(gold))
        assert ours.per_query["Hit@3"][query] == bool(ranks)


# --- ties --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["MRR", "MRR@10", "Hit@1", "nDCG@10", "MAP", "R_cap@1"])
def test_one_tie_policy_for_every_metric(metric):
    # ir_measures 0.4.3 on three tied documents: RR 1.0 but RR@10 0.333
    for gold, position in (("a", 1), ("b", 2), ("c", 3)):
        run, qrels = {"q": tied("a", "b", "c")}, {"q": {gold: 1}}
        direct = {"q": ranking("a", "b", "c")}
        assert value(run, qrels, metric) == value(direct, qrels, metric)
        reverse = {"q": ranking("c", "b", "a")}
        assert value(run, qrels, metric, ties="trec") == value(reverse, qrels, metric)
        assert value(run, qrels, metric, ties="best") == 1.0
        assert value(run, qrels, metric, ties="worst") == value({"q": ranking("x", "y", gold)}, qrels, metric), position


def test_renaming_documents_changes_nothing_unless_trec_is_asked_for():
    run, qrels = {"q": tied("a", "b")}, {"q": {"a": 1}}
    renamed_run, renamed_qrels = {"q": tied("z", "b")}, {"q": {"z": 1}}
    assert value(run, qrels, "nDCG@10") == value(renamed_run, renamed_qrels, "nDCG@10") == 1.0
    assert value(run, qrels, "nDCG@10", ties="trec") < value(renamed_run, renamed_qrels, "nDCG@10", ties="trec")


def test_a_constant_scorer_gets_the_same_from_mrr_and_ndcg():
    run, qrels = {"q": tied(*"abcdefghijkl")}, {"q": {"l": 1}}
    assert value(run, qrels, "MRR@10") == value(run, qrels, "nDCG@10") == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_best_and_worst_enclose_every_tie_break(seed):
    run, qrels = random_case(seed, True)
    run = run or {"q0": ranking("d1")}
    for metric in ("nDCG@10", "MRR@10", "Recall@5"):
        low, high = (value(run, qrels, metric, ties=end) for end in ("worst", "best"))
        assert low <= value(run, qrels, metric) <= high
        assert low <= value(run, qrels, metric, ties="trec") <= high


def test_mean_average_precision_is_mrr_with_one_relevant_document():
    rng = random.Random(3)
    run = {f"q{i}": tied(*rng.sample("abcdef", 6)) for i in range(20)}
    qrels = {query: {rng.choice("abcdef"): 1} for query in run}
    for ties in ("rank", "trec"):
        assert value(run, qrels, "MAP", ties=ties) == pytest.approx(value(run, qrels, "MRR", ties=ties))


# --- denominators ------------------------------------------------------------------------------------------


def test_missing_queries_count_zero_in_every_metric():
    result = evaluate({"q1": ranking("a")}, {"q1": {"a": 1}, "q2": {"b": 1}}, ["nDCG@10", "MRR", "Hit@1", "R_cap@5"])
    assert set(result.values.values()) == {0.5}
    assert (result.counts.queries, result.counts.missing, result.counts.empty) == (2, 1, 0)


def test_empty_rankings_count_zero():
    result = evaluate({"q1": Hits((), ())}, {"q1": {"a": 1}}, ["nDCG@10", "MRR@10", "Recall@5"])
    assert set(result.values.values()) == {0.0}
    assert (result.counts.missing, result.counts.empty, result.counts.top10) == (0, 1, 0)


def test_an_empty_run_is_all_zero():
    result = evaluate({}, {"q1": {"a": 1}, "q2": {"b": 2}}, ["MAP", "Hit@1"])
    assert result.values == {"MAP": 0.0, "Hit@1": 0.0}
    assert result.counts.missing == 2


def test_queries_without_positives():
    run = {"q1": ranking("a"), "q2": ranking("a"), "q3": ranking("a"), "q4": ranking("a")}
    qrels = {"q1": {"a": 1}, "q2": {"a": 0}, "q3": {}}
    excluded = evaluate(run, qrels, ["Hit@1", "nDCG@10", "R_cap@2"], queries=["q1", "q2", "q3", "q4"])
    assert set(excluded.values.values()) == {1.0}
    assert (excluded.counts.queries, excluded.counts.without_positives, excluded.counts.extra) == (1, 3, 0)
    rules = Conventions(no_positives="miss")
    missed = evaluate(run, qrels, ["Hit@1", "nDCG@10"], conventions=rules, queries=["q1", "q2", "q3", "q4"])
    assert set(missed.values.values()) == {0.25}
    assert missed.per_query["Hit@1"] == {"q1": 1, "q2": 0, "q3": 0, "q4": 0}
    assert (missed.counts.queries, missed.counts.without_positives) == (4, 3)


def test_a_higher_threshold_moves_queries_out_of_the_mean():
    run = {"q1": ranking("a", "b"), "q2": ranking("a")}
    qrels = {"q1": {"a": 1, "b": 2}, "q2": {"a": 1}}
    result = evaluate(run, qrels, ["MRR", "Hit@1"], conventions=Conventions(min_rel=2))
    assert result.values == {"MRR": 0.5, "Hit@1": 0.0}
    assert (result.counts.queries, result.counts.without_positives) == (1, 1)


def test_extra_queries_are_left_out_and_counted():
    result = evaluate({"q1": ranking("a"), "other": ranking("a")}, {"q1": {"a": 1}}, ["Hit@1"])
    assert (result.values["Hit@1"], result.counts.extra) == (1.0, 1)


def test_unjudged_and_dangling():
    run = {"q1": ranking("a", "u1", *(f"x{i}" for i in range(10)), "u2"), "q2": ranking("b")}
    qrels = {"q1": {"a": 1, "gone": 1, "away": 0} | {f"x{i}": 0 for i in range(10)}, "q2": {"b": 1}}
    counts = evaluate(run, qrels, ["Hit@1"], corpus={"a", "b", "u1", "u2"}).counts
    assert (counts.top10, counts.unjudged_top10, counts.dangling) == (11, 1, 1)
    assert evaluate(run, qrels, ["Hit@1"]).counts.dangling is None


def test_a_document_with_the_id_of_the_query_is_dropped_only_when_asked_for():
    run, qrels = {"7": ranking("7", "a")}, {"7": {"a": 1}}
    assert value(run, qrels, "MRR") == 0.5
    assert value(run, qrels, "MRR", drop_self=True) == 1.0
    assert value({"7": ranking("7", "a")}, {"7": {"7": 1}}, "Hit@1") == 1.0


# --- input -------------------------------------------------------------------------------------------------


def test_nothing_given_is_changed():
    run, qrels = {"q": tied("b", "a"), "r": tied("r")}, {"q": {"a": -1, "b": 2}, "s": {}}
    run_before, qrels_before = dict(run), copy.deepcopy(qrels)
    for ties in ("rank", "trec", "best", "worst"):
        evaluate(run, qrels, conventions=Conventions(ties=ties, drop_self=True, no_positives="miss"))
    assert (run, qrels) == (run_before, qrels_before)


@pytest.mark.parametrize("rel", [np.int64(1), 1.0, np.float32(1), True])
def test_whole_numbers_of_any_type_are_judgements(rel):
    assert value({"q": ranking("a")}, {"q": {"a": rel}}, "nDCG@10") == 1.0


@pytest.mark.parametrize("rel", [0.5, math.nan, math.inf, "1", None])
def test_other_judgements_are_refused(rel):
    with pytest.raises(ValueError, match="query 'q', document 'a'"):
        evaluate({"q": ranking("a")}, {"q": {"a": rel}})


def test_negative_judgements_gain_nothing():
    run = {"q": ranking("bad", "good")}
    assert value(run, {"q": {"bad": -2, "good": 1}}, "nDCG@10") == value(run, {"q": {"bad": 0, "good": 1}}, "nDCG@10")


def test_numpy_scores_extreme_scores_and_unicode_ids():
    hits = Hits(("ä b", "日本"), (np.float32(2.5), np.float64(1e300 * 0 + 1)))
    assert value({"ü": hits}, {"ü": {"日本": 1}}, "MRR") == 0.5
    huge = Hits(("a", "b"), (1e301, 1e300))  # both infinite in float32
    assert value({"q": huge}, {"q": {"b": 1}}, "MRR") == 0.5
    assert value({"q": huge}, {"q": {"b": 1}}, "MRR", ties="trec") == 1.0


@pytest.mark.parametrize("name", ["Hit", "hit@1", "Hit@0", "Hit@-1", "Hit@1.5", "NDCG@10", "Recall@", "", "R@1"])
def test_unknown_metrics_are_refused(name):
    with pytest.raises(ValueError, match="is not a metric; use Hit@k"):
        evaluate({"q": ranking("a")}, {"q": {"a": 1}}, [name])
    with pytest.raises(ValueError, match="is not a metric"):
        check_metrics(["Hit@1", name])


def test_what_cannot_be_averaged_is_an_error():
    with pytest.raises(ValueError, match="none of the 1 judged queries has a relevant document"):
        evaluate({"q": ranking("a")}, {"q": {"a": 0}})
    with pytest.raises(ValueError, match="none of the 0"):
        evaluate({}, {})
    with pytest.raises(ValueError, match="no metrics"):
        evaluate({"q": ranking("a")}, {"q": {"a": 1}}, [])
    with pytest.raises(ValueError, match=r"such as 'Q1'.*such as '1'"):
        evaluate({"Q1": ranking("a")}, {"1": {"a": 1}})


def test_conventions_are_checked_and_described():
    with pytest.raises(ValueError, match="ties='coin'.*rank, trec, best, worst"):
        Conventions(ties="coin")
    with pytest.raises(ValueError, match="no_positives='zero'"):
        Conventions(no_positives="zero")
    with pytest.raises(ValueError, match="min_rel=0"):
        Conventions(min_rel=0)
    assert describe_conventions(Conventions()) == ""
    assert describe_conventions(Conventions(ties="trec", min_rel=2)) == "ties=trec, min_rel=2"


def test_as_dict_is_plain():
    result = evaluate({"q": ranking("a")}, {"q": {"a": 1}}, ["Hit@1"])
    assert result.as_dict() == {
        "values": {"Hit@1": 1.0},
        "counts": {
            "queries": 1,
            "missing": 0,
            "empty": 0,
            "without_positives": 0,
            "extra": 0,
            "top10": 1,
            "unjudged_top10": 0,
            "dangling": None,
        },
        "conventions": {"ties": "rank", "min_rel": 1, "no_positives": "exclude", "drop_self": False},
    }


# --- documents ---------------------------------------------------------------------------------------------


def test_documents_of_passages():
    hits = Hits(("a1", "b1", "a2", "c1"), (3.0, 2.0, 2.0, 1.0), Cost(requests=4))
    documents = to_documents(hits, lambda passage: passage[0])
    assert (documents.ids, documents.scores, documents.cost) == (("a", "b", "c"), (3.0, 2.0, 1.0), hits.cost)
    assert to_documents(hits, {"a1": "A", "a2": "A", "b1": "B", "c1": "A"}).ids == ("A", "B")
    with pytest.raises(ValueError, match="'b1' belongs to no document"):
        to_documents(hits, {"a1": "A"})


def test_judgements_of_documents():
    qrels = {"q": {"a1": 0, "a2": 2, "b1": -1}, "r": {}}
    assert qrels_to_documents(qrels, lambda passage: passage[0]) == {"q": {"a": 2, "b": -1}, "r": {}}
    assert qrels == {"q": {"a1": 0, "a2": 2, "b1": -1}, "r": {}}


def test_all_gold_found():
    run = {"both": ranking("a", "x", "b"), "one": ranking("a", "x", "y"), "gone": ranking("a"), "none": ranking("x")}
    qrels = {"both": {"a": 1, "b": 1, "x": 0}, "one": {"a": 1, "b": 1}, "gone": {"a": 1, "lost": 1}, "none": {}}
    found = evaluate(run, qrels, ["All@2", "All@3"], corpus={"a", "b", "x", "y"})
    assert found.per_query["All@3"] == {"both": 1, "one": 0, "gone": 0}
    assert found.per_query["All@2"] == {"both": 0, "one": 0, "gone": 0}
    assert (found.counts.dangling, found.counts.without_positives) == (1, 1)
    with pytest.raises(ValueError, match="'All' is not a metric"):
        check_metrics(["All"])
    many = {f"d{i}": 1 for i in range(49)}  # 49 * (1 / 49) is not 1 in floating point
    assert value({"q": ranking(*many)}, {"q": many}, "All@49") == 1
    assert value({"q": ranking(*list(many)[1:])}, {"q": many}, "All@49") == 0
