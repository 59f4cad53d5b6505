"""`ServedScorer` against a real server with our own model behind it, and against answers that cannot be."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fakes import COST, make_slate
from http_servers import local_scorer, plain_slate, serving
from served_client import Gauge, client, drop_one, without_key_or_waits

from retrail.models.config import NavigateConfig
from retrail.models.decision.navigate import Navigator
from retrail.models.decision.served_http import (
    BadAnswer,
)
from retrail.models.protocols import Candidate, Slate

SLATES = [make_slate(size, seed) for seed in range(2) for size in (5, 1, 7)]
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    without_key_or_waits(monkeypatch)


@pytest.fixture(scope="module")
def local():
    return local_scorer()


@pytest.mark.parametrize("protocol", ["systemone", "decisions"])
@pytest.mark.parametrize("ask", ["yes", "choose"])
def test_served_answers_equal_those_in_process(local, protocol, ask):
    with serving(local) as (url, app), client(url, protocol) as scorer:
        for slate in SLATES:
            [here], [there] = getattr(local, ask)([slate]), getattr(scorer, ask)([slate])
            assert there.values_C.dtype == np.float64
            np.testing.assert_array_equal(there.values_C, here.values_C)
        together = getattr(scorer, ask)(SLATES)
    spread = []
    for there, here in zip(together, getattr(local, ask)(SLATES), strict=True):
        np.testing.assert_allclose(there.values_C, here.values_C, atol=1e-5)
        spread.append(np.ptp(there.values_C))
    assert max(spread) > 1e-3


def test_navigation_through_a_server_equals_that_in_process(local):
    from decision_toy import toy_corpus

    corpus, config = toy_corpus(), NavigateConfig(keep=[2], choose=3)
    queries = ["where is jam?", "apple or bread"]
    with serving(local) as (url, _), client(url, max_candidates=local.max_candidates) as scorer:
        there = Navigator(scorer, corpus, config).search(queries, k=5)
    here = Navigator(local, corpus, config).search(queries, k=5)
    assert [hits.ids for hits in there] == [hits.ids for hits in here]
    np.testing.assert_allclose([h.scores for h in there], [h.scores for h in here], atol=1e-5)


def test_rerank_values_and_the_choice_among_them(local):
    slate = plain_slate("q", "alpha", "beta gamma", "delta")
    with serving(local) as (url, _), client(url, "rerank") as scorer:
        [yes], [choice] = scorer.yes([slate]), scorer.choose([slate])
    np.testing.assert_array_equal(yes.values_C, local.yes([slate])[0].values_C)
    odds = yes.values_C / (1 - yes.values_C)
    np.testing.assert_allclose(choice.values_C, odds / odds.sum(), rtol=1e-9)
    assert choice.values_C.sum() == pytest.approx(1, abs=1e-12)


def test_unbounded_relevance_goes_through_one_increasing_map():
    scores = [2.0, -1000.0, 0.0, 1000.0]

    def answer(_):
        return {"results": [{"index": i, "relevance_score": s} for i, s in enumerate(scores)]}

    slate = plain_slate("q", *"abcd")
    with serving(faults=[answer] * 3) as (url, _), client(url, "rerank_logits") as scorer:
        [yes], [choice] = scorer.yes([slate]), scorer.choose([slate])
        with client(url, "rerank") as strict, pytest.raises(BadAnswer, match="is 2, no probability; .*rerank_logits"):
            strict.yes([slate])
    np.testing.assert_allclose(yes.values_C, [1 / (1 + math.exp(-2)), 0, 0.5, 1], atol=1e-15)
    np.testing.assert_allclose(choice.values_C, [0, 0, 0, 1], atol=1e-15)


def test_the_state_holds_the_slate_and_questions_are_short(local):
    slate = Slate(
        "q", (Candidate("secret-id", "T", "t", "Page"), Candidate("x", "", "u", "Page", True), Candidate("y", "", "v"))
    )
    with serving(local) as (url, app), client(url) as scorer:
        scorer.yes([slate])
    [(headers, body)] = app.requests
    assert body["state"] == {
        "query": "q",
        "candidates": [
            {"id": "1", "group": "Page", "title": "T", "text": "t"},
            {"id": "2", "text": "u", "brief": True},
            {"id": "3", "group": "", "text": "v"},
        ],
    }
    assert list(body["questions"]) == ["1", "2", "3"]
    assert "candidate 2 " in body["questions"]["2"]["instructions"]
    assert "secret-id" not in json.dumps(body) and "authorization" not in headers


@pytest.mark.parametrize(
    ("protocol", "where"), [("systemone", "answers"), ("decisions", "answers"), ("rerank", "results")]
)
def test_answers_are_matched_by_id_not_by_place(local, protocol, where):
    def backwards(answer):
        rows = answer[where]
        return {**answer, where: dict(reversed(rows.items())) if isinstance(rows, dict) else rows[::-1]}

    def of_choice(answer):
        if protocol == "systemone":
            table = answer["answers"]["choice"]["probabilities"]
            answer["answers"]["choice"]["probabilities"] = dict(reversed(table.items()))
        elif protocol == "decisions":
            answer["answers"][0]["probabilities"].reverse()
        else:
            return backwards(answer)
        return answer

    slate = plain_slate("q", "alpha", "beta gamma", "delta office appeal")
    with serving(local, faults=[backwards, of_choice]) as (url, _), client(url, protocol) as scorer:
        [yes], [choice] = scorer.yes([slate]), scorer.choose([slate])
    np.testing.assert_array_equal(yes.values_C, local.yes([slate])[0].values_C)
    if protocol != "rerank":
        np.testing.assert_array_equal(choice.values_C, local.choose([slate])[0].values_C)


def test_decisions_without_names_count_by_place_only_if_all_are_there(local):
    def nameless(answer):
        return {**answer, "answers": [{k: v for k, v in a.items() if k != "name"} for a in answer["answers"]]}

    def short(answer):
        return {**answer, "answers": nameless(answer)["answers"][1:]}

    slate = make_slate(4)
    with serving(local, faults=[nameless, short]) as (url, _), client(url, "decisions") as scorer:
        np.testing.assert_array_equal(scorer.yes([slate])[0].values_C, local.yes([slate])[0].values_C)
        with pytest.raises(BadAnswer, match="3 answers without names to 4 questions"):
            scorer.yes([slate])


def change_one(value):
    def change(answer):
        if "results" in answer:
            answer["results"][0]["relevance_score"] = value
        elif isinstance(answer["answers"], dict):
            answer["answers"]["2"]["noul"] = value
        else:
            answer["answers"][1]["probability"] = value
        return answer

    return change


@pytest.mark.parametrize("protocol", ["systemone", "decisions", "rerank"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (change_one(1.5), "1.5"),
        (change_one(-0.1), "-0.1"),
        (change_one(float("nan")), "nan"),
        (change_one(float("inf")), "inf"),
        (change_one(10**400), "out of range"),
        (change_one("0.5"), "'0.5'"),
        (change_one(True), "True"),
        (change_one(None), "missing"),
        (drop_one, "missing"),
        (lambda a: {}, "is missing"),
        (lambda a: [a], "no JSON object"),
        (lambda a: b"<!DOCTYPE html><h1>Please log in</h1>", "no JSON; it begins '<!DOCTYPE html><h1>Please log in"),
    ],
)
def test_answers_that_cannot_be(local, protocol, fault, message):
    with serving(local, faults=[fault]) as (url, app), client(url, protocol) as scorer:
        with pytest.raises(BadAnswer, match=message) as caught:
            scorer.yes([make_slate(3)])
        assert f"{url}/v1/{protocol}" in str(caught.value)
    assert len(app.requests) == 1  # the same question would be answered alike


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {**p, "1": p["1"] + 0.5}, "sum to 1.5"),
        (lambda p: {k: v for k, v in p.items() if k != "2"}, "option 2 is missing"),
        (lambda p: {**p, "9": 0.0}, "'9' that was not among"),
    ],
)
def test_choices_that_cannot_be(local, change, message):
    def fault(answer):
        answer["answers"]["choice"]["probabilities"] = change({"1": 0.2, "2": 0.3, "3": 0.5})
        return answer

    with serving(local, faults=[fault]) as (url, _), client(url) as scorer, pytest.raises(BadAnswer, match=message):
        scorer.choose([make_slate(3)])


def test_a_rounded_choice_is_normalised(local):
    def fault(answer):
        answer["answers"]["choice"]["probabilities"] = {"1": 0.2, "2": 0.3, "3": 0.49}
        return answer

    with serving(local, faults=[fault]) as (url, _), client(url) as scorer:
        [answer] = scorer.choose([make_slate(3)])
    np.testing.assert_allclose(answer.values_C, np.array([0.2, 0.3, 0.49]) / 0.99)


def test_refusals_are_named(local):
    def refuse(answer):
        answer["answers"][1] = {"type": "refusal", "name": "2"}
        return answer

    with serving(local, faults=[refuse]) as (url, _), client(url, "decisions") as scorer:
        with pytest.raises(BadAnswer, match="refuses to answer '2'"):
            scorer.yes([make_slate(3)])


@pytest.mark.parametrize("name", ["1", 7])
def test_two_answers_to_one_question(local, name):
    def twice(answer):
        answer["answers"][1]["name"] = name
        return answer

    with serving(local, faults=[twice]) as (url, _), client(url, "decisions") as scorer:
        with pytest.raises(BadAnswer, match="which is no name, or that of another"):
            scorer.yes([make_slate(3)])


def test_at_most_eight_requests_run_together():
    with serving(Gauge(), faults=[0.1] * 24) as (url, app), client(url) as scorer:
        answers = scorer.yes([make_slate(2, seed) for seed in range(24)])
        assert {a.cost.max_concurrency for a in answers} == {8}
        [alone] = scorer.yes([make_slate(2)])
        assert alone.cost.max_concurrency == 1
        with ThreadPoolExecutor(3) as pool:  # several callers share the limit
            parts = list(pool.map(lambda n: scorer.yes([make_slate(2, n * 9 + i) for i in range(8)]), range(3)))
    assert max(a.cost.max_concurrency for part in parts for a in part) <= 8
    assert len(app.requests) == 24 + 1 + 24


def test_costs_and_notes():
    slate = Slate("q", (Candidate("long", "", "x" * 900), Candidate("b", "", "y" * 900, "", True)))
    with serving(Gauge()) as (url, app), client(url, max_candidate_chars=500, max_brief_chars=20) as scorer:
        [one, two] = scorer.yes([slate, make_slate(3)])
        assert scorer.num_tokens(slate.candidates[0]) < 300
    assert one.notes == (
        "text of long cut from 900 to 500 characters", "text of b cut from 900 to 20 characters", "note of the server"
    )  # fmt: skip
    assert one.cost.requests == 1 and one.cost.prompt_tokens == COST.prompt_tokens
    assert 0 < one.cost.seconds and two.cost.seconds > 0


def test_none_of_these():
    with serving(Gauge()) as (url, app):
        for protocol in ("systemone", "decisions"):
            with client(url, protocol) as scorer:
                [answer] = scorer.choose([make_slate(3)], none=True)
                assert answer.none == pytest.approx(0.25)
                np.testing.assert_allclose(answer.values_C, [0.25] * 3)
                assert scorer.choose([make_slate(3)])[0].none is None
                assert scorer.choose([make_slate(1)], none=True)[0].none == 0.5
        with client(url, "rerank") as scorer, pytest.raises(ValueError, match="rerank cannot answer"):
            scorer.choose([make_slate(3)], none=True)


def test_one_option_needs_no_request():
    with client("http://127.0.0.1:9") as scorer:
        [answer] = scorer.choose([make_slate(1)])
        assert answer.values_C.tolist() == [1.0] and answer.cost.requests == 0
        assert scorer.yes([]) == [] == scorer.choose([])


def test_a_choice_takes_at_most_255_options():
    with serving(Gauge()) as (url, app), client(url) as scorer:
        assert len(scorer.choose([make_slate(255, words=1)])[0].values_C) == 255
        with pytest.raises(ValueError, match="among 256 options .* ask yes/no about them first"):
            scorer.choose([make_slate(255, words=1)], none=True)
        with pytest.raises(ValueError, match="among 300 options"):
            scorer.choose([make_slate(300, words=1)])
    assert len(app.requests) == 1


def test_bad_slates_are_refused_before_any_request():
    with client("http://127.0.0.1:9") as scorer:
        with pytest.raises(ValueError, match="no candidates"):
            scorer.yes([Slate("q", ())])
