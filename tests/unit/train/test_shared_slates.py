"""Training slates that several queries share."""

import numpy as np
import pytest
import torch
from decision_toy import shake, tiny_decision, toy_corpus, toy_objective

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.examples import DecisionRow
from retrail.data_prep.task import Query
from retrail.models.config import AdapterConfig
from retrail.models.decision.batch import SlateBatch
from retrail.train.config import DecisionObjectiveConfig
from retrail.train.losses import bce_sum, listwise_sum
from retrail.train.objectives.decision import DecisionObjective, gold_path_rows

KEYS = [(row, epoch) for row in range(32) for epoch in range(4)]


def shared_objective(head="pointer", **config):
    model, layout = tiny_decision(head, AdapterConfig(rank=2), order="candidates_first")
    settings = {"min_candidates": 4, "max_candidates": 6, "queries": 5, "none_share": 0.0, **config}
    return shake(model), toy_objective(layout, **settings)


def test_every_query_finds_its_own_answer_and_no_other_of_its_answers():
    _, objective = shared_objective()
    corpus, rows = objective.corpus, {}
    for source in objective.rows:
        rows.setdefault((source.query, source.level), source)
    sizes = set()
    for row, epoch in KEYS:
        slates, labels_NC = objective.shared(row, epoch)
        candidates = [corpus.row(c.id) for c in slates[0].candidates]
        assert len(set(candidates)) == len(candidates) <= 6
        assert len({slate.query for slate in slates}) == len(slates) <= 5
        assert slates[0].query == objective.rows[row].query
        assert all(slate.candidates is slates[0].candidates for slate in slates)
        sizes.add(len(slates))
        for slate, labels_C in zip(slates, labels_NC, strict=True):
            source = rows[slate.query, objective.rows[row].level]
            assert labels_C.sum() >= 1
            assert [bool(y) for y in labels_C] == [c in source.gold for c in candidates]
            for candidate, label in zip(candidates, labels_C, strict=True):
                assert label or any(candidate in part for part in (*source.siblings, *source.others))
    assert max(sizes) == 5


def test_shared_slates_follow_from_seed_epoch_and_row_alone():
    (_, one), (_, two) = shared_objective(), shared_objective()
    for row, epoch in KEYS[::-1]:
        np.random.seed(row)
        slates, labels = two.shared(row, epoch)
        expected, right = one.shared(row, epoch)
        assert slates == expected and labels.tolist() == right.tolist()
    assert one.slate(3, 1)[0] == one.shared(3, 1)[0][0]


def test_a_node_of_unknown_relevance_keeps_a_query_away():
    """q1 is answered by a whole page, so whether a section of it answers q1 nobody said."""
    corpus = toy_corpus(pages=2, sections=2)
    qrels = {"q0": {"p0s0": 1}, "q1": {"p0": 1, "p1s1": 1}, "q2": {"p1s0": 1}}
    rows = gold_path_rows(corpus, [Query(q, f"query {q}") for q in qrels], qrels)
    _, layout = tiny_decision("pointer", order="candidates_first")
    config = DecisionObjectiveConfig(min_candidates=4, max_candidates=4, queries=4, none_share=0.0)
    objective = DecisionObjective(rows, corpus, layout, config)
    seen = set()
    for row in range(len(rows)):
        if rows[row].level != 1:
            continue
        for epoch in range(20):
            slates, _ = objective.shared(row, epoch)
            ids = {c.id for c in slates[0].candidates}
            asking = frozenset(slate.query[-2:] for slate in slates)
            assert not ("q1" in asking and ids & {"p0s0", "p0s1"})
            seen.add(asking)
    assert frozenset({"q1", "q2"}) in seen and frozenset({"q0", "q2"}) in seen


def test_no_node_is_favoured_by_how_often_it_is_asked_for():
    """Thirty queries are answered by n0 and one by each other node: every node on a slate is right for one of them."""
    corpus = Corpus.from_nodes(Node(f"n{i}", None, "", f"text {i}") for i in range(8))
    queries = [Query(f"q{i}", f"words {i}") for i in range(37)]
    qrels = {q.id: {"n0" if i < 30 else f"n{i - 29}": 1} for i, q in enumerate(queries)}
    _, layout = tiny_decision("pointer", order="candidates_first")
    config = DecisionObjectiveConfig(min_candidates=6, max_candidates=6, queries=6, none_share=0.0)
    objective = DecisionObjective(gold_path_rows(corpus, queries, qrels), corpus, layout, config)
    for row in range(37):
        _, labels_NC = objective.shared(row, 0)
        assert labels_NC.sum(0).tolist() == [1.0] * 6


def test_hard_company_comes_before_any_other():
    """Four favourites of a retriever and eight other nodes, each the answer to a query of its own."""
    corpus = Corpus.from_nodes(Node(f"n{i}", None, "", f"text {i}") for i in range(13))
    level = corpus.level_rows(0)
    rows = [
        DecisionRow(f"q{i}", f"words {i}", 0, (i,), (level[:i], level[i + 1 :]), (), (3, 5, 7, 11) if i == 0 else ())
        for i in level
    ]
    _, layout = tiny_decision("pointer", order="candidates_first")

    def favourites(random_share):
        settings = {"min_candidates": 5, "max_candidates": 5, "queries": 5, "none_share": 0.0, "sibling_share": 0.0}
        config = DecisionObjectiveConfig(**settings, random_share=random_share)
        objective = DecisionObjective(rows, corpus, layout, config)
        slates = [objective.shared(0, epoch)[0] for epoch in range(20)]
        return [sum(c.id in ("n3", "n5", "n7", "n11") for c in shown[0].candidates) for shown in slates]

    assert set(favourites(0.0)) == {4}
    assert set(favourites(0.5)) <= {2, 3, 4} and 2 in favourites(0.5)
    assert np.mean(favourites(1.0)) == pytest.approx(4 * 4 / 12, abs=0.6)


def test_company_is_near_and_random():
    _, layout = tiny_decision("pointer", order="candidates_first")

    def siblings(**config):
        objective = toy_objective(layout, min_candidates=5, max_candidates=5, queries=5, none_share=0.0, **config)
        corpus, counts = objective.corpus, []
        for row, source in enumerate(objective.rows):
            if source.level == 1 and len(source.gold) == 1:
                page = corpus.parent(source.gold[0])
                slates, _ = objective.shared(row, 0)
                counts.append(sum(corpus.parent(corpus.row(c.id)) == page for c in slates[0].candidates) - 1)
        return np.mean(counts)

    near, far = siblings(sibling_share=0.75, random_share=1.0), siblings(sibling_share=0.0, random_share=1.0)
    assert near > 2.2 and far < 1.5


@pytest.mark.parametrize("head", ["pointer", "yes_no"])
def test_one_forward_gives_the_loss_of_each_query_alone(head):
    model, objective = shared_objective(head)
    chunk = [(row, 0) for row in (0, 9, 30)]
    batch = objective.collate(chunk)
    assert batch.counts["listwise"] == sum(len(objective.shared(*key)[0]) for key in chunk) > 6
    expected = {"bce": 0.0, "listwise": 0.0, "choice": 0.0}
    with torch.no_grad():
        sums = objective.loss(model, batch).sums
        for key in chunk:
            for slate, labels in zip(*objective.shared(*key), strict=True):
                y, one = torch.from_numpy(labels), torch.zeros(len(labels), dtype=torch.long)
                logits = model.yes_logits(SlateBatch.of([objective.layout.render(slate)]))
                expected["bce"] += bce_sum(logits, y).item()
                expected["listwise"] += listwise_sum(logits, y, one, 1).item()
                choice = model.choice_logits(SlateBatch.of([objective.layout.render_choice(slate)]))
                expected["choice"] += listwise_sum(choice, y, one, 1).item()
    assert sums.keys() == ({"bce", "listwise", "choice"} if head == "yes_no" else {"bce", "listwise"})
    for name, value in sums.items():
        assert value.item() == pytest.approx(expected[name], rel=1e-4)


def test_length_is_what_collate_makes():
    _, objective = shared_objective("yes_no")
    chunk = [(3, 1), (8, 0)]
    assert objective.collate(chunk).num_tokens == sum(objective.length(*key) for key in chunk)


def test_an_empty_batch_gives_zero_and_keeps_the_graph():
    model, objective = shared_objective()
    sums = objective.loss(model, objective.collate([])).sums
    assert {value.item() for value in sums.values()} == {0.0}
    sum(sums.values()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters() if p.requires_grad)


def test_queries_that_cannot_share_are_refused():
    _, layout = tiny_decision("pointer")
    with pytest.raises(ValueError, match="objective.queries=4 .*decision.order=candidates_first"):
        toy_objective(layout, queries=4)
    with pytest.raises(ValueError, match="objective.queries=0 must be 1 or more"):
        DecisionObjectiveConfig(queries=0)
