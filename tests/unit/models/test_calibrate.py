"""The promise, by simulation and by hand; folds that share nothing; sets that are too small; survival as counted."""

import math

import numpy as np
import pytest
from decision_oracle import made_queries, made_tree, oracle
from fakes import FakeScorer

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost
from retrail.data_prep.task import Query
from retrail.models.config import NavigateConfig
from retrail.models.decision.budget import Calibrated, KeepCount
from retrail.models.decision.calibrate import (
    Labelled,
    fit,
    folds_of,
    gold_positions,
    gold_score,
    labelled,
    shuffled,
    tuning_size,
)
from retrail.models.decision.memo import MemoScorer
from retrail.models.decision.navigate import LevelScores, Navigator
from retrail.models.decision.survival import (
    FixedBudget,
    best_within,
    cheapest_as_safe,
    fixed_budgets,
    measure,
)
from retrail.models.protocols import Candidate, Slate


def walker(scorer, corpus):
    return lambda budget: Navigator(scorer, corpus, NavigateConfig(choose=0), budget=budget)


class Table:
    """An observer without walks: level 0 with these log-odds for each query, of a tree with one level that chooses."""

    def __init__(self, log_odds_NC):
        self.log_odds_NC = log_odds_NC

    def observe(self, queries, level):
        return [
            LevelScores(tuple(range(len(self.log_odds_NC[int(q)]))), self.log_odds_NC[int(q)], Cost()) for q in queries
        ]


def questions(count, gold=lambda n: 0):
    return [Labelled(f"q{n}", str(n), ((gold(n),),)) for n in range(count)]


@pytest.mark.parametrize("score", ["odds", "gap", "mass", "rank", "auto"])
@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_coverage_over_many_random_splits(score, alpha):
    """At least 1 - alpha within three standard errors, and no more than the correction and ties explain."""
    rng = np.random.default_rng(0)
    width, labels, fresh, repeats = 12, 59, 40, 120
    corpus = made_tree(width, 2)
    lost = []
    for repeat in range(repeats):
        shift = 4 * rng.random((labels + fresh, 1))
        gold = rng.integers(width, size=labels + fresh)
        is_gold = np.arange(width) == gold[:, None]
        odds = shift * (rng.normal(size=is_gold.shape) + shift * is_gold) - shift**2 / 2
        every = questions(labels + fresh, lambda n, gold=gold: int(gold[n]))
        levels = fit(lambda budget, odds=odds: Table(odds), corpus, every[:labels], alpha, score=score, seed=repeat)
        kept = [Calibrated(levels).keep(0, odds[n]) for n in range(labels, labels + fresh)]
        lost.append(np.mean([gold[labels + n] not in keep for n, keep in enumerate(kept)]))
    mean, error = np.mean(lost), np.std(lost) / math.sqrt(repeats)
    assert mean <= alpha + 3 * error
    if score != "rank":  # a rank has ties, which are all kept
        fitted = labels - tuning_size(labels, 1, alpha) if score == "auto" else labels
        assert mean >= alpha - 1 / (fitted + 1) - 3 * error


def test_coverage_of_a_whole_walk():
    corpus = made_tree(6, 6, 3)
    queries, qrels = made_queries(corpus, 4_000)
    every = labelled(corpus, queries, qrels)
    memo = MemoScorer(oracle())
    lost, alpha, each = [], 0.2, 200
    for start in range(0, len(every), each):
        part = every[start : start + each]
        levels = fit(walker(memo, corpus), corpus, part[:150], alpha)
        found = measure(walker(memo, corpus), Calibrated(levels), corpus, part[150:])
        lost.append(1 - found.survived / found.queries)
        assert sum(rule.alpha for rule in levels) == pytest.approx(alpha)
    mean, error = np.mean(lost), np.std(lost) / math.sqrt(len(lost))
    assert alpha * 0.5 < mean <= alpha + 3 * error


def test_threshold_by_hand():
    # The gold candidate of query n is n below the best one; 19 queries and alpha 0.1 leave one of them out.
    odds = np.array([[-float(n), 0.0, -50.0] for n in range(19)])
    [rule] = fit(lambda budget: Table(odds), made_tree(3, 2), questions(19), 0.1, score="gap")
    assert (rule.score, rule.threshold, rule.alpha, rule.queries) == ("gap", 17.0, 0.1, 19)
    [rule] = fit(lambda budget: Table(odds), made_tree(3, 2), questions(19), 0.05, score="odds")
    assert rule.threshold == 18.0


def test_what_was_lost_above_is_not_lost_here():
    odds = np.array([[-float(n), 0.0, -50.0] for n in range(30)])

    def threshold(alpha, labels):
        lost = [Labelled(f"x{n}", str(n), ((77,),)) for n in range(labels, 30)]
        [rule] = fit(lambda budget: Table(odds), made_tree(3, 2), questions(labels) + lost, alpha, score="gap")
        assert rule.queries == 30
        return rule.threshold

    # (30 + 1) * 0.1 = 3.1: the third largest, though only 19 come here with their gold path.
    assert threshold(0.1, 19) == 16.0
    # More may be lost than come here: only the least that any of them needs.
    assert threshold(0.7, 19) == 0.0
    assert threshold(0.1, 0) == 0.0


def test_auto_takes_the_cheapest_score():
    # The gold one is half a nat below the best, which is the worst of a narrow field and the second of a wide one.
    rng = np.random.default_rng(0)
    odds = rng.normal(0, 1, (200, 20)) * rng.choice([0.01, 9], size=(200, 1))
    odds[:, 0] = odds[:, 1:].max(axis=1) - 0.5
    odds += 50 * rng.normal(size=(200, 1))
    [rule] = fit(lambda budget: Table(odds), made_tree(20, 2), questions(200), 0.1)
    assert rule.score == "gap" and rule.queries == 179
    # The gold one is always the fourth, however far it is below the first.
    odds = np.sort(rng.normal(0, 3, (200, 20)), axis=1)[:, ::-1] * rng.uniform(0.01, 9, size=(200, 1))
    assert fit(lambda budget: Table(odds), made_tree(20, 2), questions(200, lambda n: 3), 0.1)[0].score == "rank"


def test_each_level_has_queries_of_its_own():
    corpus = made_tree(4, 4, 2)
    queries, qrels = made_queries(corpus, 200)
    asked = []

    def walk(budget):
        navigator = Navigator(oracle(), corpus, NavigateConfig(choose=0), budget=budget)

        class Watched:
            def observe(self, texts, level):
                asked.append((level, len(budget.levels), tuple(texts)))
                return navigator.observe(texts, level)

        return Watched()

    fit(walk, corpus, labelled(corpus, queries, qrels), 0.2)
    assert [(level, above) for level, above, _ in asked] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    tuning, first, known, second = (set(texts) for _, _, texts in asked)
    assert known == tuning | first
    assert len(tuning) == 22 and len(first) == len(second) == 89
    assert not tuning & first and not tuning & second and not first & second
    before = list(asked)
    asked.clear()
    fit(walk, corpus, labelled(corpus, queries[::-1], qrels), 0.2)
    assert asked == before  # the order of the file does not matter


def test_folds_cover_everything_once():
    for count in (1, 2, 3, 7):
        for size in range(30):
            tuning, folds = folds_of(questions(size), count, size // 5)
            assert [q for part in (tuning, *folds) for q in part] == questions(size)
            assert max(map(len, folds)) - min(map(len, folds)) <= 1 and len(tuning) == size // 5


def test_folds_have_the_sizes_at_which_thresholds_are_exact():
    # alpha 0.025: one of 39 may be above the threshold, two of 79, three of 119.
    assert tuning_size(182, 2, 0.025) == 182 - 2 * 79
    assert tuning_size(176, 2, 0.025) == 176 - 2 * 79
    assert tuning_size(175, 2, 0.025) == 175 - 2 * 39  # 17 of 175 would be less than a tenth
    assert tuning_size(87, 2, 0.025) == 9 and tuning_size(86, 2, 0.025) == 86
    for total in range(1, 400):
        spare = tuning_size(total, 2, 0.025)
        assert spare == total or (total >= 87 and spare >= total / 10 and (total - spare) % 2 == 0)


def test_the_seed_decides_the_order():
    some = questions(50)
    assert shuffled(some, 0) == shuffled(some[::-1], 0) != shuffled(some, 1)
    assert shuffled(some, 0) != some


@pytest.mark.parametrize(("score", "total"), [("gap", 78), ("auto", 87)])
def test_sets_that_are_too_small_say_how_many_it_takes(score, total):
    corpus = made_tree(3, 3, 2)
    queries, qrels = made_queries(corpus, total)
    every = labelled(corpus, queries, qrels)
    message = (
        f"alpha=0.05 over 2 levels is 0.025 a level, which takes at least 39 .*: {total} labelled .* there are 70;"
    )
    walk = walker(FakeScorer(lambda query, candidate: 0.5), corpus)
    with pytest.raises(ValueError, match=message):
        fit(walk, corpus, every[:70], 0.05, score=score)
    assert len(fit(walk, corpus, every, 0.05, score=score)) == 2


@pytest.mark.parametrize(
    ("widths", "settings", "message"),
    [
        ((5,), {}, "the corpus has one level"),
        ((5, 2), {"alpha": 0.0}, "alpha=0.0 must be above 0"),
        ((5, 2), {"alpha": 1.0}, "alpha=1.0 must be above 0 and below 1"),
        ((5, 2), {"score": "luck"}, "score='luck' is not a choice; use one of: auto, odds, gap, mass, rank"),
        ((5, 2), {"gold": "some"}, "gold='some' is not a choice; use one of: any, all"),
    ],
)
def test_impossible_requests(widths, settings, message):
    with pytest.raises(ValueError, match=message):
        fit(lambda budget: Table(np.zeros((9, 5))), made_tree(*widths), questions(9), **{"alpha": 0.5, **settings})


RAGGED = Corpus.from_nodes(
    Node(i, i.rpartition("/")[0] or None, i, i)
    for i in ("a", "b", "c", "a/1", "a/2", "b/1", "a/1/x", "a/1/y", "b/1/x", "b/1/y")
)


def seen_of(*ids, odds=None):
    rows = tuple(RAGGED.row(i) for i in ids)
    return LevelScores(rows, np.array(odds if odds is not None else range(len(rows), 0, -1), dtype=float), Cost())


def path(node_id):
    return RAGGED.path(RAGGED.row(node_id))


@pytest.mark.parametrize(
    ("judged", "gold", "level", "expected"),
    [
        (("a", "b", "c"), "b/1/x", 0, [1]),
        (("a/1", "a/2", "b/1", "c"), "b/1/x", 1, [2]),
        (("a/1", "a/2", "c"), "b/1/x", 1, []),
        (("a/1", "a/2", "b/1", "c"), "c", 1, [3]),  # a leaf that stayed
        (("a/1/x", "a/1/y", "a/2", "b/1/x"), "a", 2, [0, 1, 2]),  # whatever is below a gold page
        (("a/1", "a/2", "b/1"), "a", 1, [0, 1]),
    ],
)
def test_gold_positions(judged, gold, level, expected):
    assert gold_positions(RAGGED, seen_of(*judged), path(gold), level).tolist() == expected


def test_any_and_all_gold_paths():
    seen = seen_of("a/1", "a/2", "b/1", odds=[5, 3, 1])
    both, gone = [path("a/1/x"), path("b/1/y")], [path("a/1/x"), path("c")]
    assert gold_score(RAGGED, seen, both, 1, "gap", "any") == 0
    assert gold_score(RAGGED, seen, both, 1, "gap", "all") == 4
    assert gold_score(RAGGED, seen, gone, 1, "gap", "any") == 0
    assert gold_score(RAGGED, seen, gone, 1, "gap", "all") == math.inf
    # Nothing is chosen among leaves, and nothing where the walk has ended.
    assert gold_score(RAGGED, seen_of("c", "a/1/x"), gone, 2, "gap", "all") == -math.inf
    assert gold_score(RAGGED, seen_of(), gone, 2, "gap", "all") == -math.inf


def test_labelled_leaves_out_queries_without_gold():
    queries = [Query("1", "one"), Query("2", "two"), Query("3", "three"), Query("4", "four")]
    found = labelled(RAGGED, queries, {"1": {"a/1": 1, "c": 2}, "2": {"a": 0}, "4": {"elsewhere": 1}})
    assert found == [Labelled("1", "one", (path("a/1"), path("c")))]


def test_survival_by_hand():
    corpus = made_tree(3, 2, 2)
    # Query 0 wants the best root and the best page, 1 the second root, 2 the third root, 3 the worse page of the best.
    believed = {"0": 0.9, "1": 0.6, "2": 0.3, "0/0": 0.8, "0/1": 0.2, "1/0": 0.7, "1/1": 0.75}
    scorer = FakeScorer(lambda query, candidate: believed.get(candidate.id, 0.1))
    golds = ("0/0/0", "1/0/1", "2/0/0", "0/1/1")
    every = [Labelled(f"q{n}", f"q{n}", (corpus.path(corpus.row(gold)),)) for n, gold in enumerate(golds)]
    found = measure(walker(scorer, corpus), KeepCount((2, 2)), corpus, every)
    # Two of three roots; of "0/0", "0/1", "1/0", "1/1" the best two are "0/0" and "1/1".
    first, second = found.levels
    assert (first.reached, first.survived, first.judged, first.kept) == (4, 3, 3, 2)
    assert (second.reached, second.survived, second.judged, second.kept) == (3, 1, 4, 2)
    assert (found.queries, found.survived, found.candidates) == (4, 1, 3 + 4 + 4)
    table = {
        b.keep: (b.survived, b.candidates) for b in fixed_budgets(walker(scorer, corpus), corpus, every, [2, 1, 3])
    }
    assert table == {
        (1, 1): (1, 3 + 2 + 2),
        (1, 2): (2, 3 + 2 + 4),  # 2 is as wide as two pages: 3 would be the same
        (2, 1): (1, 3 + 4 + 2),
        (2, 2): (1, 3 + 4 + 4),
        (2, 3): (2, 3 + 4 + 6),
        (3, 1): (1, 3 + 6 + 2),
        (3, 2): (1, 3 + 6 + 4),
        (3, 3): (2, 3 + 6 + 6),
    }
    with pytest.raises(ValueError, match="no labelled queries"):
        measure(walker(scorer, corpus), KeepCount((2,)), corpus, [])


# Walks that take the wrong one of the first two roots end a level earlier.
UNEVEN = Corpus.from_nodes(node for node in made_tree(5, 4, 3) if node.id[0] not in "01" or node.id.count("/") < 2)


@pytest.mark.parametrize("keep", [(1, 2), (3, 5), (2, 9)])
@pytest.mark.parametrize("gold", ["any", "all"])
@pytest.mark.parametrize("corpus", [made_tree(5, 4, 3), UNEVEN], ids=["even", "uneven"])
def test_two_ways_to_count_agree(corpus, keep, gold):
    queries, qrels = made_queries(corpus, 60)
    qrels = {q: documents | {corpus.id(len(corpus) - 1): 1} for q, documents in qrels.items()}
    every = labelled(corpus, queries, qrels)
    walk = walker(MemoScorer(oracle()), corpus)
    found = measure(walk, KeepCount(keep), corpus, every, gold=gold)
    [fixed] = [b for b in fixed_budgets(walk, corpus, every, keep, gold=gold) if b.keep == keep]
    assert (fixed.survived, fixed.candidates) == (found.survived, pytest.approx(found.candidates))
    # And so do the traces of real searches.
    hits = Navigator(oracle(), corpus, NavigateConfig(keep=list(keep), choose=0)).search([q.text for q in every], k=99)
    every_one = any if gold == "any" else all
    assert found.survived == sum(
        every_one(corpus.id(p[-1]) in h.trace[-1].ids for p in q.paths) for q, h in zip(every, hits, strict=True)
    )
    assert found.candidates == pytest.approx(np.mean([sum(len(step.ids) for step in h.trace) for h in hits]))


def test_comparison_with_fixed_budgets():
    table = [FixedBudget((1,), 5, 10.0), FixedBudget((2,), 8, 20.0), FixedBudget((3,), 8, 30.0)]
    assert best_within(table, 35.0) == table[1] and best_within(table, 19.0) == table[0]
    assert best_within(table, 9.0) is None
    assert cheapest_as_safe(table, 6) == table[1] and cheapest_as_safe(table, 9) is None


def test_memo_answers_the_same_slate_once():
    scorer = FakeScorer(lambda query, candidate: len(query) / 10)
    memo = MemoScorer(scorer)
    slates = [Slate(q, (Candidate("a", "", "x"), Candidate("b", "", "y"))) for q in ("one", "three", "one")]
    first = memo.yes(slates)
    again = memo.yes(slates[::-1])
    assert len(scorer.asked) == 2
    assert [s.values_C[0] for s in first] == [0.3, 0.5, 0.3] and [s.values_C[0] for s in again] == [0.3, 0.5, 0.3]
    assert [s.cost.requests for s in first] == [1, 1, 0] and {s.cost for s in again} == {Cost()}
    assert (memo.max_candidates, memo.max_candidate_tokens_per_slate) == (50, 10_000)
    assert memo.yes([]) == []
