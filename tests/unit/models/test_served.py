"""`ServedScorer` against a real server with our own model behind it, and against everything that can go wrong."""

import json
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fakes import COST, make_slate
from http_servers import local_scorer, plain_slate, serving

from retrail.models.config import NavigateConfig, ServedOptions
from retrail.models.decision import served_http
from retrail.models.decision.navigate import Navigator
from retrail.models.decision.served import ServedScorer
from retrail.models.decision.served_http import (
    BadAnswer,
    RateLimited,
    ServedError,
    ServerFailed,
    ServerRefused,
    Timeout,
)
from retrail.models.protocols import Candidate, Slate, SlateScores

SLATES = [make_slate(size, seed) for seed in range(2) for size in (5, 1, 7)]
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(served_http, "_FIRST_WAIT_S", 0.01)
    monkeypatch.delenv("RETRAIL_API_KEY", raising=False)


@pytest.fixture(scope="module")
def local():
    return local_scorer()


def client(url, protocol="systemone", *, retries=2, timeout=10.0, **options):
    return ServedScorer(url, "m", protocol, ServedOptions(retries=retries, timeout=timeout, **options))


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


def drop_one(answer):
    rows = answer.get("results", answer.get("answers"))
    rows.pop("2") if isinstance(rows, dict) else rows.pop(1)
    return answer


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


@pytest.mark.parametrize(
    "fault", [(429, {}, "slow down"), (429, {"retry-after": "0"}, ""), (500, {}, "oops"), (503, {}, ""), "cut"]
)
def test_failures_that_pass_are_asked_again(local, fault):
    slate = make_slate(4)
    with serving(local, faults=[fault, fault]) as (url, app), client(url) as scorer:
        [answer] = scorer.yes([slate])
    np.testing.assert_array_equal(answer.values_C, local.yes([slate])[0].values_C)
    assert len(app.requests) == 3 and answer.cost.requests == 3


@pytest.mark.parametrize(
    ("fault", "kind", "message", "tries"),
    [
        ((429, {}, '{"error": {"message": "quota"}}'), RateLimited, "HTTP 429 .try 3 of 3.: 'quota'; wait", 3),
        ((500, {}, "<html>oops"), ServerFailed, "HTTP 500 .try 3 of 3.: '<html>oops'", 3),
        ("cut", ServerFailed, "cut the connection .try 3 of 3.", 3),
        ((404, {}, '{"detail": "no such model"}'), ServerRefused, "HTTP 404 .*no such model", 1),
        ((401, {}, "who?"), ServerRefused, "environment variable RETRAIL_API_KEY", 1),
        ((307, {"location": "https://elsewhere.example"}, ""), ServerRefused, "HTTP 307", 1),
        (
            (422, {}, '{"detail": [{"loc": ["body", "state"], "msg": "Field required"}]}'),
            ServerRefused,
            "body.state: Field required",
            1,
        ),
        ((429, {"retry-after": "3600"}, "tomorrow"), RateLimited, "tomorrow", 1),
    ],
)
def test_failures_that_stay_are_typed_errors(local, fault, kind, message, tries):
    with serving(local, faults=[fault] * 5) as (url, app), client(url) as scorer:
        with pytest.raises(kind, match=message) as caught:
            scorer.yes([make_slate(3)])
    assert isinstance(caught.value, ServedError) and url in str(caught.value)
    assert len(app.requests) == tries


def test_a_slow_server_is_left_and_asked_again(local):
    slate = make_slate(3)
    with serving(local, faults=[3.0, None]) as (url, app), client(url, timeout=0.5) as scorer:
        [answer] = scorer.yes([slate])
        assert answer.cost.requests == 2
        app.faults = [3.0] * 2
        with client(url, timeout=0.3, retries=1) as hasty, pytest.raises(Timeout, match="within 0.3 s .try 2 of 2"):
            hasty.yes([slate])


def test_nobody_listens():
    with client("http://127.0.0.1:9", retries=1) as scorer, pytest.raises(ServerFailed, match="cannot be reached"):
        scorer.yes([make_slate(2)])


def test_retry_after_is_honoured(local):
    with serving(local, faults=[(429, {"retry-after": "1"}, "")]) as (url, _), client(url) as scorer:
        [answer] = scorer.yes([make_slate(2)])
    assert answer.cost.seconds >= 1.0


def test_retry_after_may_be_a_date():
    assert served_http._retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert served_http._retry_after({"retry-after": "soon"}) is None
    assert served_http._retry_after({}) is None


def test_waits_are_the_same_each_time_and_grow(local, monkeypatch):
    waits = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, t=None: waits.append(t))
    for _ in range(2):
        endpoint = served_http.Endpoint("http://127.0.0.1:9", ServedOptions(retries=3))
        with pytest.raises(ServerFailed):
            endpoint.post("/v1/rerank", "{}", threading.Event())
        endpoint.close()
    assert waits[:3] == waits[3:] and all(0.5 <= w / (0.01 * 2**n) <= 1 for n, w in enumerate(waits[:3]))


class Gauge:
    """A scorer that notes nothing; the server's own worker takes one request at a time."""

    max_candidates, max_candidate_tokens_per_slate = 50, 10_000

    def num_tokens(self, candidate):
        return 1

    def yes(self, slates):
        return [SlateScores(np.full(len(s.candidates), 0.25), ("note of the server",), COST) for s in slates]

    def choose(self, slates, *, none=False):
        out = []
        for slate in slates:
            values = np.full(len(slate.candidates), 1 / (len(slate.candidates) + none))
            out.append(SlateScores(values, none=1 / (len(slate.candidates) + 1) if none else None))
        return out


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


def test_the_first_error_stops_the_rest_and_is_the_one_that_is_told():
    faults = [(503, {"retry-after": "50"}, "")] * 7 + [(400, {}, "the real one")]
    with serving(Gauge(), faults=faults) as (url, app), client(url) as scorer:
        with pytest.raises(ServerRefused, match="the real one"):
            scorer.yes([make_slate(2, seed) for seed in range(40)])
    assert len(app.requests) <= 16
    assert not [t for t in threading.enumerate() if t.name.startswith("served")]


# --- key ---------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_told_nobody(local, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    caplog.set_level(logging.DEBUG)
    cache = tmp_path / "cache.sqlite"
    faults = [None, (401, {}, f"wrong key {KEY}"), (500, {}, KEY * 9), lambda a: f"<html>{KEY}".encode()]
    with serving(local, faults=faults) as (url, app):
        with client(url, key_env="MY_KEY", cache=str(cache), retries=0) as scorer:
            scorer.yes([make_slate(2)])
            texts = [repr(scorer), str(vars(scorer)), str(vars(scorer._endpoint))]
            for n in range(3):
                with pytest.raises(ServedError) as caught:
                    scorer.yes([make_slate(3 + n)])
                texts.append(str(caught.value))
    assert [headers["authorization"] for headers, _ in app.requests] == [f"Bearer {KEY}"] * 4
    assert "***" in texts[3] and "***" in texts[4] and "***" in texts[5]
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    logs = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(("uvicorn", "asyncio")))
    assert KEY not in "".join(texts) and KEY.encode() not in stored and KEY not in logs


def test_a_key_that_no_header_can_carry(monkeypatch):
    monkeypatch.setenv("RETRAIL_API_KEY", "sk-\u00e9\u2026")
    with pytest.raises(ValueError, match="RETRAIL_API_KEY holds characters") as caught:
        client("http://127.0.0.1:9")
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "no address of a server"),
        ("ftp://x", "no address"),
        ("http://me:pw@host", "keys come from the environment"),
        ("http://host/?key=pw", "keys come from"),
    ],
)
def test_addresses(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        client(url)
    assert "pw" not in str(caught.value)


def test_v1_at_the_end_of_an_address_is_not_doubled(local):
    with client("http://127.0.0.1:9/v1/") as scorer:
        assert scorer.url == "http://127.0.0.1:9/v1/systemone"


def test_unknown_protocol():
    with pytest.raises(ValueError, match="protocol='grpc' is not a choice"):
        client("http://127.0.0.1:9", "grpc")


# --- cache -------------------------------------------------------------------------------------------------------


def test_cached_answers_cost_nothing_and_outlive_the_server(local, tmp_path):
    cache = str(tmp_path / "new" / "cache.sqlite")
    with serving(local) as (url, app), client(url, cache=cache) as scorer:
        first = scorer.yes(SLATES)
    with client(url, cache=cache, retries=0) as scorer:
        again = scorer.yes(SLATES)
        with pytest.raises(ServerFailed):
            scorer.choose([SLATES[0]])
    with ServedScorer(url, "other", options=ServedOptions(cache=cache, retries=0)) as scorer:
        with pytest.raises(ServerFailed):
            scorer.yes([SLATES[0]])
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.values_C, two.values_C)
        assert two.cost.requests == 0 and two.cost.prompt_tokens == 0
        assert two.notes[-1] == "answered from the cache"
    assert len(app.requests) == len(SLATES)


def test_wrong_answers_are_not_cached(local, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    with serving(local, faults=[drop_one]) as (url, app), client(url, cache=cache) as scorer:
        with pytest.raises(BadAnswer):
            scorer.yes([make_slate(3)])
        assert scorer.yes([make_slate(3)])[0].cost.requests == 1
