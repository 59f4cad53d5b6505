"""Every budget by hand, conformal quantiles by hand, and the file of a calibration, damaged in every way."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from fakes import FakeScorer

from retrail.data_prep.corpus import Corpus, Node
from retrail.models.config import NavigateConfig
from retrail.models.decision.budget import (
    Calibrated,
    KeepCount,
    KeepShare,
    KeepThreshold,
    make_budget,
)
from retrail.models.decision.calibration import (
    Calibration,
    LevelThreshold,
    check_calibration,
    read_calibration,
    walk_settings,
    write_calibration,
)
from retrail.models.decision.conformal import (
    SCORES,
    conformal_threshold,
    may_be_lost,
    nonconformity,
    queries_needed,
    wilson,
)
from retrail.models.decision.navigate import Navigator

# Ranked: position 2, then 0 and 3 (equal, in reading order), then 1, 4.
ODDS = np.array([1.0, -1.0, 3.0, 1.0, -4.0])
RANKED = [2, 0, 3, 1, 4]
CALIBRATION = Calibration(
    alpha=0.1,
    gold="any",
    levels=(LevelThreshold("gap", 2.0, 0.05, 40), LevelThreshold("odds", -0.5, 0.05, 38)),
    retriever="model",
    corpus="corpus",
    walk=walk_settings(NavigateConfig()),
)


def test_count_by_hand():
    budget = KeepCount((1, 3))
    assert budget.keep(0, ODDS).tolist() == [2]
    assert budget.keep(1, ODDS).tolist() == budget.keep(7, ODDS).tolist() == [2, 0, 3]
    assert KeepCount((9,)).keep(0, ODDS).tolist() == RANKED


def test_share_by_hand():
    # 0.2 of 5 is 1, 0.41 is 2.05 and so 3, 0.01 is one all the same.
    budget = KeepShare((0.2, 0.41, 0.01, 1.0))
    assert [len(budget.keep(level, ODDS)) for level in range(5)] == [1, 3, 1, 5, 5]
    assert budget.keep(1, ODDS).tolist() == [2, 0, 3]


@pytest.mark.parametrize("percent", range(1, 101))
def test_a_share_of_a_hundred_is_exact(percent):
    assert len(KeepShare((percent / 100,)).keep(0, np.zeros(100))) == percent


def test_threshold_by_hand():
    # P(yes): 0.73, 0.27, 0.95, 0.73, 0.02
    budget = KeepThreshold((0.5, 0.9, 0.99, 0.0))
    kept = [budget.keep(level, ODDS).tolist() for level in range(4)]
    assert kept == [[2, 0, 3], [2], [2], RANKED]


@pytest.mark.parametrize("bar", [0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_probability_at_the_bar_stays(bar):
    log_odds = np.log(np.array([bar, bar - 1e-6, bar])) - np.log(1 - np.array([bar, bar - 1e-6, bar]))
    assert KeepThreshold((bar,)).keep(0, log_odds).tolist() == [0, 2]


def test_scores_by_hand():
    assert nonconformity("odds", ODDS).tolist() == [-1, 1, -3, -1, 4]
    assert nonconformity("gap", ODDS).tolist() == [2, 4, 0, 2, 7]
    assert nonconformity("rank", ODDS).tolist() == [1, 3, 0, 2, 4]
    mass = np.exp(ODDS) / np.exp(ODDS).sum()
    above = [mass[2], mass[[2, 0, 3]].sum(), 0, mass[[2, 0]].sum(), mass[[2, 0, 3, 1]].sum()]
    assert 1 - np.exp(-nonconformity("mass", ODDS)) == pytest.approx(above)


def test_mass_keeps_a_far_tail_apart():
    assert (np.diff(nonconformity("mass", np.array([50.0, 0.0, -50.0, -100.0]))) > 40).all()


@pytest.mark.parametrize("score", SCORES)
def test_every_score_grows_along_the_ranking(score):
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 50):
        odds = np.round(rng.normal(0, 3, size), 1)
        order = np.argsort(-odds, kind="stable")
        assert (np.diff(nonconformity(score, odds)[order]) >= 0).all()


def test_calibrated_by_hand():
    levels = tuple(
        LevelThreshold(*rule, 0.1, 20)
        for rule in (("odds", 1.0), ("odds", -9.0), ("gap", 2.0), ("rank", 2.0), ("mass", 0.0))
    )
    budget = Calibrated(levels)
    kept = [budget.keep(level, ODDS).tolist() for level in range(5)]
    assert kept == [[2, 0, 3, 1], [2], [2, 0, 3], [2, 0, 3], [2]]
    with pytest.raises(ValueError, match=r"thresholds for 5 levels, but this walk must choose on level 6"):
        budget.keep(5, ODDS)


def test_unknown_score():
    with pytest.raises(ValueError, match="score='luck' is not a choice; use one of: odds, gap, mass, rank"):
        nonconformity("luck", ODDS)


def test_threshold_is_the_corrected_quantile():
    scores = np.arange(19.0)[::-1]
    # (19 + 1) * 0.95 = 19, the largest; (19 + 1) * 0.9 = 18, the one before.
    assert conformal_threshold(scores, 0.05) == 18
    assert conformal_threshold(scores, 0.1) == 17
    assert conformal_threshold(scores, 0.5) == 9
    with pytest.raises(ValueError, match="alpha=0.05 needs at least 19 labelled queries, there are 18"):
        conformal_threshold(scores[:18], 0.05)


@pytest.mark.parametrize("alpha", ["0.01", "0.05", "0.1", "0.2", "0.07", "0.3"])
def test_quantile_against_exact_arithmetic(alpha):
    exact = Fraction(alpha)
    assert queries_needed(float(alpha)) == math.ceil(1 / exact) - 1
    for count in range(queries_needed(float(alpha)), 120):
        place = math.ceil((count + 1) * (1 - exact))
        assert conformal_threshold(np.arange(1.0, count + 1), float(alpha)) == place <= count


def test_wilson_by_hand():
    # z^2 / n = 0.38416: (0.8 + 0.19208 -+ sqrt(0.16 * 0.38416 + 0.03690)) / 1.38416
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(10, 10)[1] == 1.0 and wilson(0, 10)[0] == 0.0


def test_make_budget(tmp_path):
    file = tmp_path / "c.json"
    write_calibration(file, CALIBRATION)
    assert make_budget(NavigateConfig(keep=[3, 2])) == KeepCount((3, 2))
    assert make_budget(NavigateConfig(budget="share", share=[0.5])) == KeepShare((0.5,))
    assert make_budget(NavigateConfig(budget="threshold", threshold=[0.2])) == KeepThreshold((0.2,))
    config = NavigateConfig(budget="calibrated", calibration=str(file))
    assert make_budget(config) == Calibrated(CALIBRATION.levels, str(file))
    other = NavigateConfig(budget="calibrated", calibration=str(file), path_weight=0.5)
    with pytest.raises(ValueError, match=r"c.json\['walk'\]\['path_weight'\] is 0.0, but navigate.path_weight is 0.5"):
        make_budget(other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": "all"}, "navigate.budget='all' is not a choice; use one of: count, share, threshold, calibrated"),
        ({"share": []}, r"navigate.share=\[\] must list"),
        ({"share": [0.0]}, r"navigate.share=\[0.0\] must list at least one number, each above 0"),
        ({"share": [1.1]}, "at most 1"),
        ({"share": [float("nan")]}, "navigate.share"),
        ({"threshold": [-0.1]}, "navigate.threshold=.* between 0 and 1"),
        ({"threshold": []}, "navigate.threshold"),
        ({"budget": "calibrated"}, "also needs navigate.calibration=FILE"),
        ({"calibration": "x.json"}, "navigate.calibration=x.json has no meaning for navigate.budget=count"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        NavigateConfig(**settings)


def test_the_file_comes_back_equal(tmp_path):
    file = tmp_path / "deep" / "c.json"
    write_calibration(file, CALIBRATION)
    assert read_calibration(file) == CALIBRATION
    write_calibration(file, CALIBRATION)
    assert [f.name for f in file.parent.iterdir()] == ["c.json"]


DAMAGE = [
    (lambda c: c.pop("format"), "no calibration"),
    (lambda c: c.update(format_version=2), "format_version is 2, this version reads 1"),
    (lambda c: c.pop("levels"), "has no key 'levels'"),
    (lambda c: c.update(levels=[]), r"\['levels'\] is empty"),
    (lambda c: c.update(levels=[3]), r"\['levels'\]\[0\] must be an object"),
    (lambda c: c.update(alpha=1.5), r"\['alpha'\] is 1.5, but must be above 0 and below 1"),
    (lambda c: c.update(alpha="0.1"), r"\['alpha'\] must be a number, not a string"),
    (lambda c: c.update(gold="some"), r"\['gold'\] is 'some', this version knows: any, all"),
    (lambda c: c.update(retriever=3), r"\['retriever'\] must be a string"),
    (lambda c: c.update(walk=[]), r"\['walk'\] must be an object"),
    (lambda c: c["levels"][1].pop("threshold"), r"\['levels'\]\[1\] has no key 'threshold'"),
    (lambda c: c["levels"][1].update(threshold=True), r"\['levels'\]\[1\]\['threshold'\] must be a number"),
    (lambda c: c["levels"][0].update(threshold=-1.0), r"\['levels'\]\[0\]\['threshold'\] is -1.0, which 'gap' never"),
    (lambda c: c["levels"][0].update(score="luck"), r"\['levels'\]\[0\]\['score'\] is 'luck'"),
    (lambda c: c["levels"][0].update(alpha=0), r"\['levels'\]\[0\]\['alpha'\] is 0"),
    (lambda c: c["levels"][0].update(queries=0), r"\['levels'\]\[0\]\['queries'\] is 0"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_damaged_files(tmp_path, damage, message):
    file = tmp_path / "c.json"
    write_calibration(file, CALIBRATION)
    content = json.loads(file.read_text())
    damage(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        read_calibration(file)
    assert "c.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "retrail-calibration", "alpha": NaN}'])
def test_files_that_are_no_json(tmp_path, text):
    file = tmp_path / "c.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="c.json"):
        read_calibration(file)
    with pytest.raises(FileNotFoundError, match="absent.json"):
        read_calibration(tmp_path / "absent.json")


def test_infinity_in_a_file(tmp_path):
    file = tmp_path / "c.json"
    write_calibration(file, CALIBRATION)
    file.write_text(file.read_text().replace("-0.5", "1e999"))
    with pytest.raises(ValueError, match=r"\['levels'\]\[1\]\['threshold'\] is inf"):
        read_calibration(file)


def test_the_model_must_be_the_same_and_the_corpus_should(tmp_path):
    file = tmp_path / "c.json"
    write_calibration(file, CALIBRATION)
    assert check_calibration(file, retriever="model", corpus="corpus") == ()
    [note] = check_calibration(file, retriever="model", corpus="other")
    assert "fitted on another corpus" in note
    with pytest.raises(ValueError, match=r"\['retriever'\] is model, but this retriever is another"):
        check_calibration(file, retriever="another", corpus="corpus")


def test_a_walk_with_each_budget(tmp_path):
    nodes = [Node(i, i.rpartition("/")[0] or None, i, i) for i in ("a", "b", "c", "a/1", "b/1", "c/1")]
    believed = {"a": 0.9, "b": 0.6, "c": 0.2}
    scorer = FakeScorer(lambda query, candidate: believed.get(candidate.id, 0.5))
    file = tmp_path / "c.json"
    write_calibration(file, CALIBRATION)  # log-odds 2.2, 0.4, -1.4: a gap of 2 keeps two

    def reached(**settings):
        [hits] = Navigator(scorer, Corpus.from_nodes(nodes), NavigateConfig(choose=0, **settings)).search(["q"])
        return hits.ids

    assert reached(keep=[1]) == ("a/1",)
    assert reached(budget="share", share=[0.5]) == ("a/1", "b/1")
    assert reached(budget="threshold", threshold=[0.15]) == ("a/1", "b/1", "c/1")
    assert reached(budget="threshold", threshold=[0.95]) == ("a/1",)
    assert reached(budget="calibrated", calibration=str(file)) == ("a/1", "b/1")


def test_observe_shows_what_the_walk_judges():
    nodes = [Node(i, i.rpartition("/")[0] or None, i, i) for i in ("a", "b", "c", "a/1", "a/1/x", "b/1", "b/2")]
    corpus = Corpus.from_nodes(nodes)
    believed = {"a": 0.9, "b": 0.6, "c": 0.2, "b/1": 0.7}
    scorer = FakeScorer(lambda query, candidate: believed.get(candidate.id, 0.1) if query == "q" else 0.5)
    navigator = Navigator(scorer, corpus, NavigateConfig(keep=[2, 1]), queries_at_once=1)
    for level, expected in enumerate((["a", "b", "c"], ["a/1", "b/1", "b/2"], ["b/1"], [])):
        seen = navigator.observe(["q", "other"], level)
        assert [corpus.id(row) for row in seen[0].rows] == expected
        values = [believed.get(i, 0.1) for i in expected]
        assert 1 / (1 + np.exp(-seen[0].log_odds_C)) == pytest.approx(values)
    # A leaf that stays is judged again, and then the walk has ended. The other query keeps "a/1" by reading order.
    assert [corpus.id(row) for row in navigator.observe(["q", "other"], 2)[1].rows] == ["a/1/x"]


def test_a_promise_with_confidence_by_hand():
    # 0.95^44 is above 0.1 and 0.95^45 below: 45 queries support the largest score as threshold.
    assert queries_needed(0.05, 0.9) == 45
    assert (may_be_lost(44, 0.05, 0.9), may_be_lost(45, 0.05, 0.9)) == (0, 1)
    assert conformal_threshold(np.arange(45.0), 0.05, 0.9) == 44
    with pytest.raises(ValueError, match="alpha=0.05 needs at least 45 labelled queries, there are 44"):
        conformal_threshold(np.arange(44.0), 0.05, 0.9)
    # P(Bin(10, 1/2) <= 1) = 11/1024 and <= 2 is 56/1024.
    assert may_be_lost(10, 0.5, 1 - 12 / 1024) == 2 and may_be_lost(10, 0.5, 1 - 10 / 1024) == 1


@pytest.mark.parametrize("count", [60, 200])
def test_a_promise_with_confidence_is_kept_as_often_as_it_says(count):
    rng = np.random.default_rng(0)
    alpha, confidence, repeats = 0.1, 0.9, 2000
    scores = rng.random((repeats, count))
    # Uniform scores: the next one is above the threshold t with probability 1 - t.
    kept = np.array([1 - conformal_threshold(row, alpha, confidence) <= alpha for row in scores])
    error = math.sqrt(confidence * (1 - confidence) / repeats)
    assert kept.mean() >= confidence - 3 * error
    assert kept.mean() < 1.0  # not by keeping everything
    average = np.array([1 - conformal_threshold(row, alpha) <= alpha for row in scores])
    assert average.mean() < kept.mean() - 0.2
