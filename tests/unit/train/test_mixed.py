"""Several data sets in one run: shares, order, names, and one forward for slates of all of them."""

from collections import Counter

import pytest
import torch
from decision_toy import tiny_decision, toy_corpus, toy_queries

from retrail.train.config import DecisionObjectiveConfig
from retrail.train.objectives.decision import DecisionObjective, gold_path_rows
from retrail.train.objectives.decision_slates import SlateDraw
from retrail.train.objectives.mixed import MixedObjective
from retrail.train.sampler import Sampler, step_rows

SIZES = ((4, 4), (2, 3), (3, 5))
NAMES = ("a", "data/b", "c")


@pytest.fixture(scope="module")
def pointer():
    return tiny_decision("pointer")


def parts(layout, seed=0, **settings):
    config = DecisionObjectiveConfig(**{"min_candidates": 3, "max_candidates": 6, **settings})
    out = []
    for name, size in zip(NAMES, SIZES, strict=True):
        corpus = toy_corpus(*size)
        rows = gold_path_rows(corpus, *toy_queries(corpus))
        out.append(DecisionObjective(rows, corpus, layout, config, seed=seed, name=name))
    return out


def mixture(layout, shares=(1.0, 3.0, 1.0), seed=0, **settings):
    return MixedObjective(parts(layout, seed, **settings), shares, seed=seed)


def stream(mixed, seed, count):
    """(data set, its row, its epoch) in the order of training."""
    keys = step_rows(0, seed=seed, num_rows=mixed.num_rows, batch_size=count)
    return [(part.name, row, epoch) for part, row, epoch in (mixed.source(*key) for key in keys)]


def test_each_data_set_has_its_share_of_an_epoch(pointer):
    mixed = mixture(pointer[1])
    assert [part.num_rows for part in mixed.parts] == [32, 10, 30] and mixed.num_rows == 72
    # 72 rows in the ratio 1 : 3 : 1, with edges at 14.4, 57.6 and 72.
    assert mixed.rows_of == [14, 44, 14]
    for epoch in range(3):
        seen = Counter(mixed.source(row, epoch)[0].name for row in range(mixed.num_rows))
        assert seen == {"a": 14, "data/b": 44, "c": 14}
    # Within an epoch they are mixed, not one after the other.
    first = [name for name, _, _ in stream(mixed, 0, 20)]
    assert len(set(first)) == 3


def test_the_rows_of_a_data_set_come_as_if_it_were_alone(pointer):
    """Twin: the data set's own stream of permutations."""
    mixed = mixture(pointer[1], seed=4)
    found = {name: [] for name in NAMES}
    for name, row, epoch in stream(mixed, 4, 5 * 72):
        found[name].append((row, epoch))
    for part in mixed.parts:
        alone = step_rows(0, seed=4, num_rows=part.num_rows, batch_size=len(found[part.name]))
        assert found[part.name] == alone
    assert max(epoch for _, epoch in found["data/b"]) == 21 and max(epoch for _, epoch in found["c"]) == 2


def test_a_row_follows_from_its_number_alone(pointer):
    one, two = mixture(pointer[1], seed=1), mixture(pointer[1], seed=1)
    keys = [(row, epoch) for epoch in (5, 0, 2) for row in range(one.num_rows)]
    first = {key: one.source(*key)[1:] for key in keys}
    assert all(two.source(*key)[1:] == first[key] for key in keys[::-1])
    assert [one.length(*key) for key in keys[:9]] == [two.length(*key) for key in keys[:9]]


def test_easy_rows_are_counted_for_each_data_set(pointer):
    mixed = mixture(pointer[1], seed=2, easy_rows=40, random_share=0.0)
    counts = Counter()
    for name, row, epoch in stream(mixed, 2, 3 * 72):
        part = next(part for part in mixed.parts if part.name == name)
        draw = SlateDraw(part.rows, part.corpus, part.layout, part.config, 2)
        assert draw.random_share(row, epoch) == pytest.approx(1 - min(1.0, counts[name] / 40))
        counts[name] += 1


def test_one_batch_of_several_data_sets(pointer):
    model, layout = pointer
    mixed = mixture(layout, level_weights=[2.0, 1.0])
    keys = [(0, 0), (20, 0), (60, 0), (71, 1)]
    sources = [mixed.source(*key) for key in keys]
    assert [part.name for part, _, _ in sources] == ["a", "data/b", "c", "c"]
    batch = mixed.collate(keys)
    assert batch.names[1].startswith("data/b/q") and batch.names[1].endswith(f"(epoch {sources[1][2]})")
    assert batch.num_tokens == sum(mixed.length(*key) for key in keys)
    with torch.no_grad():
        together = mixed.loss(model, batch).sums
        alone = [part.loss(model, part.collate([(row, epoch)])).sums for part, row, epoch in sources]
    counts = [part.collate([(row, epoch)]).counts for part, row, epoch in sources]
    for name in mixed.weights:
        assert together[name].item() == pytest.approx(sum(sums[name].item() for sums in alone), rel=1e-4)
        assert batch.counts[name] == pytest.approx(sum(count[name] for count in counts))


def test_an_empty_batch_is_one_of_zeros(pointer):
    mixed = mixture(pointer[1])
    batch = mixed.collate([])
    assert (batch.names, batch.num_tokens, set(batch.counts.values())) == ((), 0, {0.0})
    assert {value.item() for value in mixed.loss(pointer[0], batch).sums.values()} == {0.0}


def test_it_is_planned_like_any_objective(pointer):
    mixed = mixture(pointer[1])
    sampler = Sampler(num_rows=mixed.num_rows, length=mixed.length, seed=0, batch_size=8, max_tokens=2000)
    rows = sorted(row for rank in sampler.plan(3, 2) for microbatch in rank for row in microbatch)
    assert rows == sorted(step_rows(3, seed=0, num_rows=72, batch_size=8))


def test_weights_that_give_nothing(pointer):
    with pytest.raises(ValueError, match="data.mix: the weight 0.001 of data/b gives it none of the 72 rows"):
        mixture(pointer[1], shares=(1.0, 0.001, 1.0))
    for shares in ((1.0, 0.0, 1.0), (1.0, float("nan"), 1.0), (1.0, 1.0)):
        with pytest.raises(ValueError, match="as many weights above 0"):
            mixture(pointer[1], shares=shares)
