"""Offsets and temperatures of split slates, by hand and against searches that know better."""

import math

import numpy as np
import pytest
from fakes import FakeScorer
from hypothesis import given, settings
from hypothesis import strategies as st

from retrail.models.decision.compare import (
    anchor_offsets,
    fit_slate_temperature,
    score_pools_anchored,
    slate_temperature,
    spread_anchors,
)
from retrail.models.decision.slates import Pool, score_pools
from retrail.models.protocols import Candidate, SlateScores

NAN = float("nan")


def test_offsets_by_hand():
    # Means 1, 3 and 8 of slates that judge all anchors; their mean is 4.
    log_odds = np.array([[0.0, 2.0], [3.0, 3.0], [7.0, 9.0]])
    assert anchor_offsets(log_odds) == pytest.approx([-3, -1, 4])
    assert anchor_offsets(np.array([[5.0, 1.0]])) == pytest.approx([0])
    # A chain: slate 0 and 1 share anchor 0 (1 apart), 1 and 2 share anchor 1 (4 apart); 0, 1, 5 less their mean 2.
    chain = np.array([[2.0, NAN, NAN], [3.0, 0.0, NAN], [NAN, 4.0, NAN]])
    assert anchor_offsets(chain) == pytest.approx([-2, -1, 3])


def test_offsets_with_a_missing_answer_by_hand():
    # Two anchors say that slate 1 is higher, by 1 and by 3; the least squares say 2. The third anchor is seen once.
    assert anchor_offsets(np.array([[0.0, 0.0, 9.0], [1.0, 3.0, NAN]])) == pytest.approx([-1, 1])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_offsets_are_found_again(slates, anchors, seed):
    rng = np.random.default_rng(seed)
    offsets = rng.normal(0, 3, slates)
    log_odds = rng.normal(0, 3, anchors) + offsets[:, None]
    holes = rng.random(log_odds.shape) < 0.4
    holes[:, 0] = False  # the first anchor is in every slate
    assert anchor_offsets(np.where(holes, NAN, log_odds)) == pytest.approx(offsets - offsets.mean(), abs=1e-9)


@pytest.mark.parametrize("log_odds", [[[1.0, NAN], [NAN, 1.0]], [[1.0], [NAN]], [[1.0, NAN], [2.0, NAN], [NAN, 3.0]]])
def test_slates_that_share_nothing(log_odds):
    with pytest.raises(ValueError, match=f"the {len(log_odds)} slates fall into groups that share no anchor"):
        anchor_offsets(np.array(log_odds))


def test_choice_of_anchors_by_hand():
    assert spread_anchors(10, 2) == [2, 7]
    assert spread_anchors(9, 3) == [1, 4, 7]
    assert spread_anchors(2, 5) == [0, 1]
    assert spread_anchors(7, 0) == []


def test_temperature_by_hand():
    assert slate_temperature(1, (0.0, 3.0)) == 1
    assert slate_temperature(50, (math.log(2), 0.5)) == pytest.approx(2 * math.sqrt(50))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_temperature_is_found_again():
    rng = np.random.default_rng(0)
    sizes = rng.choice([5, 20, 50], 60_000)
    calibrated = rng.normal(0, 2, len(sizes))
    labels = (rng.random(len(sizes)) < sigmoid(calibrated)).astype(int)
    a, b = fit_slate_temperature(calibrated * np.exp(0.3 + 0.4 * np.log(sizes)), sizes, labels)
    assert (a, b) == pytest.approx((0.3, 0.4), abs=0.06)


def test_temperature_against_a_grid():
    rng = np.random.default_rng(1)
    sizes = rng.choice([3, 30], 300)
    log_odds = rng.normal(0, 3, 300)
    labels = (rng.random(300) < sigmoid(log_odds / sizes**0.5)).astype(int)

    def loss(a, b):
        return np.logaddexp(0, np.where(labels == 1, -1, 1) * log_odds / np.exp(a + b * np.log(sizes))).mean()

    best = min(loss(a, b) for a in np.linspace(-3, 3, 61) for b in np.linspace(-2, 2, 81))
    assert loss(*fit_slate_temperature(log_odds, sizes, labels)) <= best + 1e-9


def test_temperature_has_an_end_where_every_answer_is_right():
    odds, labels = np.array([1.0, -1.0, 2.0, -3.0]), np.array([1, 0, 1, 0])
    a, b = fit_slate_temperature(odds, np.array([10, 10, 10, 10]), labels)
    assert b == 0 and slate_temperature(10, (a, b)) == pytest.approx(1 / 20, rel=1e-4)
    a, b = fit_slate_temperature(-odds, np.array([10, 10, 10, 10]), labels)
    assert slate_temperature(10, (a, b)) == pytest.approx(20, rel=1e-4)


@pytest.mark.parametrize(
    ("odds", "sizes", "labels", "message"),
    [
        ([], [], [], "do not match"),
        ([1.0], [1, 2], [1], "1 log-odds, 2 sizes and 1 labels do not match"),
        ([1.0], [0], [1], "sizes must be 1 or more"),
        ([1.0], [2], [2], "labels 0 or 1"),
    ],
)
def test_impossible_fits(odds, sizes, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_slate_temperature(np.array(odds), np.array(sizes), np.array(labels))


def pool_of(count, query="q"):
    return Pool(query, tuple(Candidate(str(n), "", "x") for n in range(count)))


class Biased(FakeScorer):
    """Adds to the log-odds of each slate an offset that depends on which candidates it holds."""

    def yes(self, slates):
        scores = super().yes(slates)
        return [
            SlateScores(sigmoid(np.log(s.values_C / (1 - s.values_C)) + self.bias(slate)), s.notes, s.cost)
            for slate, s in zip(slates, scores, strict=True)
        ]

    @staticmethod
    def bias(slate):
        return math.sin(sum(int(c.id) for c in slate.candidates))


def true_odds(query, candidate):
    return float(sigmoid(math.cos(7 * int(candidate.id) + len(query))))


@pytest.mark.parametrize("anchors", [1, 3])
def test_anchors_undo_what_slates_add(anchors):
    scorer = Biased(true_odds, max_candidates=8)
    pools = [pool_of(30), pool_of(17, "why?")]
    found = score_pools_anchored(scorer, pools, anchors)
    for pool, scores in zip(pools, found, strict=True):
        odds = np.log(scores.values_C / (1 - scores.values_C))
        expected = np.array([math.cos(7 * int(c.id) + len(pool.query)) for c in pool.candidates])
        # All are moved by one constant, so that they rank as the truth does.
        assert np.ptp(odds - expected) < 1e-9
        assert scores.notes[0] == f"split into {scores.num_slates} slates that share {anchors} anchors"
        assert scores.cost.requests == scores.cost.max_concurrency == scores.num_slates
    plain = score_pools(scorer, pools)
    assert np.ptp(np.log(plain[0].values_C / (1 - plain[0].values_C)) - [math.cos(7 * n + 1) for n in range(30)]) > 0.5
    shared = [str(n) for n in spread_anchors(30, anchors)]
    for slate in scorer.asked[: found[0].num_slates]:
        ids = [c.id for c in slate.candidates]
        assert set(shared) <= set(ids) and ids == sorted(set(ids), key=int) and len(ids) <= 8


def test_one_slate_is_as_ever():
    scorer = Biased(true_odds, max_candidates=8, notes=("cut",))
    for count in (1, 8):
        [plain], [anchored] = score_pools(scorer, [pool_of(count)]), score_pools_anchored(scorer, [pool_of(count)], 3)
        assert (plain.values_C == anchored.values_C).all()
        assert (plain.num_slates, plain.notes, plain.cost) == (anchored.num_slates, anchored.notes, anchored.cost)
    [plain], [none] = score_pools(scorer, [pool_of(30)]), score_pools_anchored(scorer, [pool_of(30)], 0)
    assert (plain.values_C == none.values_C).all() and plain.notes == none.notes
    assert score_pools_anchored(scorer, [], 3) == []


def test_anchors_within_a_limit_of_tokens():
    anchors = {str(n) for n in spread_anchors(20, 2)}
    scorer = Biased(true_odds, max_candidates=50, max_tokens=100, size=lambda c: 40 if c.id == min(anchors) else 10)
    [scores] = score_pools_anchored(scorer, [pool_of(20)], 2)
    assert len(scores.values_C) == 20 and len(scorer.asked) > 1
    for slate in scorer.asked:
        assert anchors <= {c.id for c in slate.candidates}
        assert sum(map(scorer.num_tokens, slate.candidates)) <= 100


@pytest.mark.parametrize(("limits", "anchors"), [({"max_candidates": 3}, 3), ({"max_tokens": 35}, 3)])
def test_anchors_that_fill_a_slate(limits, anchors):
    scorer = FakeScorer(true_odds, **limits)
    with pytest.raises(ValueError, match="3 anchors fill a slate of .* take fewer anchors, or larger slates"):
        score_pools_anchored(scorer, [pool_of(20)], anchors)
