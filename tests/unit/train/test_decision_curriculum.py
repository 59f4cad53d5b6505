"""From easy to hard, slates of a model's own walks, and weights of levels and of right answers."""

import numpy as np
import pytest
import torch
from decision_toy import shake, tiny_decision, toy_corpus, toy_objective, toy_queries

from retrail.data_prep.examples import DecisionRow
from retrail.models.config import AdapterConfig
from retrail.models.decision.batch import SlateBatch
from retrail.train.config import DecisionObjectiveConfig
from retrail.train.losses import bce_sum, listwise_sum
from retrail.train.objectives.decision import DecisionObjective, gold_path_rows
from retrail.train.objectives.decision_rivals import Rivals
from retrail.train.objectives.decision_slates import SlateDraw
from retrail.train.sampler import step_rows


@pytest.fixture(scope="module")
def pointer():
    return tiny_decision("pointer")


@pytest.fixture(scope="module")
def shared():
    return tiny_decision("pointer", order="candidates_first")


@pytest.fixture(scope="module")
def yes_no():
    model, layout = tiny_decision("yes_no", AdapterConfig(rank=4))
    return shake(model), layout


def stream(objective, seed, count):
    return step_rows(0, seed=seed, num_rows=objective.num_rows, batch_size=count)


def test_the_random_share_falls_along_the_order_of_training(pointer):
    settings = {"easy_rows": 50, "first_random_share": 0.9, "random_share": 0.1}
    objective = toy_objective(pointer[1], seed=3, **settings)
    draw = SlateDraw(objective.rows, objective.corpus, objective.layout, objective.config, 3)
    shares = [draw.random_share(*key) for key in stream(objective, 3, 80)]  # two and a half epochs of 32 rows
    expected = [0.9 - 0.8 * min(1.0, n / 50) for n in range(80)]
    assert shares == pytest.approx(expected)
    constant = toy_objective(pointer[1], seed=3, random_share=0.3, first_random_share=0.9)
    draw = SlateDraw(constant.rows, constant.corpus, constant.layout, constant.config, 3)
    assert {draw.random_share(*key) for key in stream(constant, 3, 80)} == {0.3}


def hard_only(layout, seed, **settings):
    """One row of 30 siblings and 8 favourites elsewhere, many times: how many favourites each slate shows."""
    corpus = toy_corpus(pages=8, sections=8)
    level = corpus.level_rows(1)
    row = DecisionRow("q", "words", 1, (level[0],), (level[1:8],), (level[8:],), tuple(level[40:48]))
    config = DecisionObjectiveConfig(
        min_candidates=9, max_candidates=9, none_share=0.0, sibling_share=0.0, random_share=0.0, **settings
    )
    objective = DecisionObjective([row] * 100, corpus, layout, config, seed=seed)
    return [
        sum(corpus.row(c.id) in row.rivals for c in objective.slate(*key)[0].candidates)
        for key in stream(objective, seed, 300)
    ]


@pytest.mark.parametrize(("order", "queries"), [("query_first", 1), ("candidates_first", 4)])
def test_both_readouts_are_trained_on_the_same_slates(order, queries):
    """So that a comparison of them changes one switch, `decision.head`, and nothing else."""
    one, two = (
        toy_objective(tiny_decision(head, order=order)[1], queries=queries, seed=1) for head in ("pointer", "yes_no")
    )
    for key in stream(one, 1, 80):
        (slates, labels), (slates_2, labels_2) = one.shared(*key), two.shared(*key)
        assert slates == slates_2 and labels.tolist() == labels_2.tolist()


def test_slates_become_hard(pointer):
    counts = hard_only(pointer[1], 5, easy_rows=200)
    assert set(counts[200:]) == {8}  # all favourites, from the end of the easy rows on
    assert np.mean([n == 8 for n in counts[:50]]) < 0.3 < 0.6 < np.mean([n == 8 for n in counts[150:200]])
    assert set(hard_only(pointer[1], 5)) == {8}


def test_company_becomes_hard(shared):
    """Where queries share a slate, fewer of their nodes are hard at first."""
    corpus = toy_corpus(pages=5, sections=5)
    queries, qrels = toy_queries(corpus)
    rows = gold_path_rows(corpus, queries, {q: dict(list(gold.items())[:1]) for q, gold in qrels.items()})
    hard = [r for r in corpus.level_rows(1)][-6:]
    rows = [
        DecisionRow(r.query_id, r.query, 1, r.gold, r.siblings, r.others, tuple(h for h in hard if h not in r.gold))
        for r in rows
        if r.level == 1
    ]
    settings = {"min_candidates": 5, "max_candidates": 5, "queries": 5, "none_share": 0.0, "sibling_share": 0.0}
    config = DecisionObjectiveConfig(**settings, random_share=0.0, easy_rows=200)
    objective = DecisionObjective(rows, corpus, shared[1], config, seed=1)
    counts = [
        sum(corpus.row(c.id) in hard for c in objective.slate(*key)[0].candidates) for key in stream(objective, 1, 300)
    ]
    assert min(counts[200:]) >= 3 and np.mean(counts[200:]) > 3.8 and np.mean(counts[:40]) < 2.5


def walked_rows(corpus, per_level):
    queries, qrels = toy_queries(corpus)
    walked = {level: {query.id: ids for query in queries} for level, ids in per_level.items()}
    return gold_path_rows(corpus, queries, qrels, rivals=Rivals(walked=walked))


def test_own_walks_are_shown_best_first(pointer):
    corpus = toy_corpus()
    pool = [corpus.id(r) for r in corpus.level_rows(1)][::-1]  # what the search liked best comes first
    rows = walked_rows(corpus, {1: pool[:10]})
    config = {"min_candidates": 6, "max_candidates": 6, "none_share": 0.0, "own_share": 1.0}
    objective = DecisionObjective(rows, corpus, pointer[1], DecisionObjectiveConfig(**config))
    others = set()
    for row, source in enumerate(rows):
        if source.level == 0:
            assert source.walked == ()
            continue
        assert [corpus.id(r) for r in source.walked] == [
            node for node in pool[:10] if corpus.row(node) not in source.gold
        ]
        for epoch in range(5):
            slate, labels = objective.slate(row, epoch)
            wrong = [c.id for c, y in zip(slate.candidates, labels, strict=True) if not y]
            assert labels.any(), "the right node is shown, whether the search judged it or not"
            assert set(wrong) <= set(pool[:10])
            best = [corpus.id(r) for r in source.walked[: -(-len(wrong) // 2)]]
            assert set(best) <= set(wrong)
            others |= {(row, node) for node in wrong if node not in best}
    assert len({node for _, node in others}) > 5  # the rest is drawn anew each time


def test_the_share_of_own_slates(pointer):
    corpus = toy_corpus(pages=8, sections=8)
    pool = [corpus.id(r) for r in corpus.level_rows(1)][-12:]
    rows = [row for row in walked_rows(corpus, {1: pool}) if row.level == 1][:20]
    config = {"min_candidates": 9, "max_candidates": 9, "none_share": 0.0, "random_share": 1.0, "own_share": 0.3}
    objective = DecisionObjective(rows, corpus, pointer[1], DecisionObjectiveConfig(**config))
    own = [
        {c.id for c, y in zip(slate.candidates, labels, strict=True) if not y} <= set(pool)
        for slate, labels in (objective.slate(row, epoch) for row in range(20) for epoch in range(30))
    ]
    assert np.mean(own) == pytest.approx(0.3, abs=0.06)


def test_a_short_walk_is_filled_up(pointer):
    corpus = toy_corpus()
    rows = walked_rows(corpus, {1: ["p3s3"]})
    config = {"min_candidates": 6, "max_candidates": 6, "none_share": 0.0, "own_share": 1.0}
    objective = DecisionObjective(rows, corpus, pointer[1], DecisionObjectiveConfig(**config))
    for row, source in enumerate(rows):
        slate, labels = objective.slate(row, 0)
        if source.level == 1 and source.walked:
            assert len(slate.candidates) == 6
            assert "p3s3" in {c.id for c, y in zip(slate.candidates, labels, strict=True) if not y}


def test_company_from_own_walks(shared):
    corpus = toy_corpus()
    pool = ["p3s3", "p3s1", "p2s2", "p2s0"]
    rows = walked_rows(corpus, {1: pool})
    config = {"min_candidates": 6, "max_candidates": 6, "queries": 6, "none_share": 0.0, "own_share": 1.0}
    objective = DecisionObjective(rows, corpus, shared[1], DecisionObjectiveConfig(**config))
    found = []
    for row, source in enumerate(rows):
        if source.level == 1 and len(source.gold) == 1 and len(source.walked) == 4:
            slates, labels_NC = objective.shared(row, 0)
            shown = {c.id for c in slates[0].candidates}
            found.append(len(shown & set(pool)))
            assert labels_NC.any(1).all()
    assert np.mean(found) > 3.5  # nearly all of the pool, each asked for by a query of its own


def test_walks_without_a_share_change_nothing(pointer):
    corpus = toy_corpus()
    plain = DecisionObjective(walked_rows(corpus, {}), corpus, pointer[1], DecisionObjectiveConfig(max_candidates=6))
    config = DecisionObjectiveConfig(max_candidates=6, own_share=0.0)
    walked = DecisionObjective(walked_rows(corpus, {1: ["p3s3"]}), corpus, pointer[1], config)
    assert all(plain.slate(row, 1)[0] == walked.slate(row, 1)[0] for row in range(plain.num_rows))


def test_level_and_positive_weights_in_sums_and_counts(yes_no):
    """Every slate alone by the plain losses, times its weights by hand."""
    model, layout = yes_no
    objective = toy_objective(layout, none_share=0.3, level_weights=[3.0, 0.5], positive_weights=[4.0, 2.0])
    chunk = [(row, 0) for row in (0, 1, 3, 9, 17, 30)]
    expected = {"bce": 0.0, "listwise": 0.0, "choice": 0.0}
    counts = dict.fromkeys(expected, 0.0)
    batch = objective.collate(chunk)
    levels = set()
    with torch.no_grad():
        sums = objective.loss(model, batch).sums
        for row, epoch in chunk:
            slate, labels = objective.slate(row, epoch)
            level = objective.rows[row].level
            levels.add(level)
            weight, positive = ((3.0, 4.0), (0.5, 2.0))[level]
            y, one = torch.from_numpy(labels), torch.zeros(len(labels), dtype=torch.long)
            logits = model.yes_logits(SlateBatch.of([layout.render(slate)]))
            for n, label in enumerate(labels):
                share = weight * (positive if label else 1.0)
                expected["bce"] += share * bce_sum(logits[n], y[n]).item()
                counts["bce"] += share
            choice = model.choice_logits(SlateBatch.of([layout.render_choice(slate)]))
            for name, values in (("listwise", logits), ("choice", choice)):
                expected[name] += weight * listwise_sum(values, y, one, 1).item()
                counts[name] += weight * bool(labels.any())
    assert levels == {0, 1}
    assert batch.counts == pytest.approx(counts)
    for name, value in sums.items():
        assert value.item() == pytest.approx(expected[name], rel=1e-4)


def test_only_ratios_of_level_weights_matter(pointer):
    model, layout = pointer
    one, two = toy_objective(layout), toy_objective(layout, level_weights=[7.0])
    chunk = [(row, 0) for row in range(6)]
    for name in ("bce", "listwise"):
        means = []
        for objective in (one, two):
            batch = objective.collate(chunk)
            with torch.no_grad():
                means.append(objective.loss(model, batch).sums[name].item() / batch.counts[name])
        assert means[0] == pytest.approx(means[1], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"easy_rows": -1}, "objective.easy_rows=-1 must be 0 or more"),
        ({"first_random_share": 1.5}, "objective.first_random_share=1.5 must be between 0 and 1"),
        ({"own_share": -0.1}, "objective.own_share=-0.1 must be between 0 and 1"),
        ({"rival_ranks": [5, 2]}, r"objective.rival_ranks=\[5, 2\] must be a first and a last rank"),
        ({"rival_ranks": [0, 2]}, r"objective.rival_ranks=\[0, 2\]"),
        ({"rival_ranks": [30]}, r"objective.rival_ranks=\[30\]"),
        ({"level_weights": []}, r"objective.level_weights=\[\] must list at least one number"),
        ({"level_weights": [1.0, 0.0]}, r"objective.level_weights=\[1.0, 0.0\] .* above 0"),
        ({"positive_weights": [float("nan")]}, "objective.positive_weights"),
    ],
)
def test_settings_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        DecisionObjectiveConfig(**settings)
