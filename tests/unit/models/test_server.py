"""The decision app over real HTTP: what it answers to good requests, to wrong ones, and under load."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from fakes import COST, make_slate
from http_servers import local_scorer, plain_slate, running, serving

from retrail.models.config import ServedOptions
from retrail.models.decision.served import ServedScorer
from retrail.models.decision.server import decision_app
from retrail.models.decision.server_plan import choice_confidence, score_confidence
from retrail.models.protocols import Candidate, Slate, SlateScores


class Known:
    """P(yes) is the share of "a" in a text; a choice is in proportion. `calls` holds the slates of every call.

    hold: every call waits until this event is set.
    """

    max_candidates, max_candidate_tokens_per_slate = 4, 100

    def __init__(self, hold=None, fail=()):
        self.calls, self.hold, self.fail = [], hold, fail
        self.began = threading.Event()

    def num_tokens(self, candidate):
        return len(candidate.text)

    def yes(self, slates):
        return self._answer(slates, lambda v: v)

    def choose(self, slates, *, none=False):
        out = self._answer(slates, lambda v: (v + 1e-9) / (v + 1e-9).sum() * (0.75 if none else 1))
        return [SlateScores(o.values_C, o.notes, o.cost, 0.25) for o in out] if none else out

    def _answer(self, slates, change):
        self.calls.append(list(slates))
        self.began.set()
        if self.hold is not None:
            assert self.hold.wait(20)
        for slate in slates:
            if slate.query in self.fail:
                raise ValueError(f"cannot say {slate.query}")
        shares = [np.array([c.text.count("a") / max(1, len(c.text)) for c in s.candidates]) for s in slates]
        return [SlateScores(change(s), (), COST) for s in shares]


@pytest.fixture(scope="module")
def known():
    with running(decision_app(Known(), name="m", max_body_bytes=40_000)) as url, httpx.Client(base_url=url) as http:
        yield http


@pytest.fixture(scope="module")
def local():
    return local_scorer()


def systemone(state, **questions):
    return {"model": "m", "state": state, "questions": questions}


STATE = {"query": "q", "candidates": [{"text": "aaab"}, {"text": "ab"}, {"text": "bbba"}]}
ASK_2 = {"type": "noul", "instructions": "Is candidate 2 any good?"}


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_a_slate_in_the_state(known):
    choice = {"type": "choice", "instructions": "Which?", "criteria": {"3": None, "1": None, "2": "x"}}
    body = systemone(STATE, b=ASK_2, a={**ASK_2, "instructions": "candidate 1?"}, c=choice)
    answer = ok(known.post("/v1/systemone", json=body))
    assert answer["model"] == "m" and list(answer["answers"]) == ["b", "a", "c"]
    assert answer["answers"]["b"] == {"type": "noul", "noul": 0.5}
    assert answer["answers"]["a"] == {"type": "noul", "noul": 0.75}
    said = answer["answers"]["c"]
    assert said["choice"] == "1" and said["probabilities"] == pytest.approx({"3": 1 / 6, "1": 0.5, "2": 1 / 3})
    assert said["confidence"] == pytest.approx((0.5 - 1 / 3) / (2 / 3))
    # One reading of the slate for both yes/no questions, one for the choice.
    assert answer["usage"] == {"input_tokens": 2 * COST.prompt_tokens, "output_tokens": 0}


def test_names_and_other_questions_change_no_answer(local):
    scorer, slate = local, make_slate(5)
    from retrail.models.decision.wire import write_state

    one = {"type": "noul", "instructions": "Is candidate 4 worth opening?"}
    other = {"type": "noul", "instructions": "Is candidate 1 worth opening?"}
    with serving(scorer) as (url, _), httpx.Client(base_url=url) as http:
        answers = [
            ok(http.post("/v1/systemone", json=systemone(write_state(slate), **questions)))["answers"][name]["noul"]
            for questions, name in (({"x": one}, "x"), ({"1": one}, "1"), ({"4": other, "é\u2028": one}, "é\u2028"))
        ]
    assert answers == [scorer.yes([slate])[0].values_C[3]] * 3


def test_none_is_an_option_beside_the_candidates(known):
    criteria = {"1": None, "2": None, "3": None, "none": "nothing fits"}
    body = systemone(STATE, c={"type": "choice", "criteria": criteria})
    said = ok(known.post("/v1/systemone", json=body))["answers"]["c"]
    assert said["probabilities"]["none"] == 0.25 and sum(said["probabilities"].values()) == pytest.approx(1)


def test_a_plain_state(known):
    body = systemone(
        "aab",
        yes={"type": "noul", "instructions": "Is it so?", "criteria": {"true": "much a", "false": "no a"}},
        which={"type": "choice", "instructions": "Which?", "criteria": {"x": "ab", "y": "aab"}},
        score={"type": "score", "instructions": "How much?", "criteria": ["b", "ab", "a"]},
    )
    said = ok(known.post("/v1/systemone", json=body))["answers"]
    assert said["yes"] == {"type": "noul", "noul": pytest.approx(2 / 3)}
    assert said["which"]["choice"] == "y"
    assert said["which"]["probabilities"] == pytest.approx({"x": 0.5 / (0.5 + 2 / 3), "y": (2 / 3) / (0.5 + 2 / 3)})
    assert said["score"]["score"] == pytest.approx(1 * 1 / 3 + 2 * 2 / 3)
    assert said["score"]["legend"] == {"0": "b", "1": "ab", "2": "a"} and said["score"]["type"] == "score"


def test_what_the_model_is_shown_of_a_plain_state():
    scorer = Known()
    with serving(scorer) as (url, _):
        body = systemone({"k": "v"}, q={"type": "noul", "instructions": "Q?", "criteria": {"true": "T"}})
        ok(httpx.post(f"{url}/v1/systemone", json=body))
        choice = {"type": "choice", "instructions": "Which?", "criteria": {"x": "ab"}}
        ok(httpx.post(f"{url}/v1/systemone", json=systemone("words", q=choice)))
    assert scorer.calls == [
        [Slate("Q?\nyes: T", (Candidate("state", "", '{"k":"v"}'),))],
        [Slate("Which?\nwords", (Candidate("option 0", "x", "ab"),))],
    ]


def test_decisions(known):
    questions = [
        {"type": "predicate", "instructions": "candidate 3"},
        {"type": "predicate", "name": "n", "instructions": [{"type": "input_text", "text": "candidate 1"}]},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": v} for v in ("2", "1", "3")]},
    ]
    body = {"model": "m", "input": json.dumps(STATE), "questions": questions}
    answer = ok(known.post("/v1/decisions", json=body))
    first, second, third = answer["answers"]
    assert first == {"type": "predicate", "name": None, "probability": 0.25}
    assert second == {"type": "predicate", "name": "n", "probability": 0.75}
    assert [p["value"] for p in third["probabilities"]] == ["2", "1", "3"] and third["choice"] == "1"
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    message = {"role": "user", "content": [{"type": "input_json", "data": STATE}]}
    assert ok(known.post("/v1/decisions", json={**body, "input": [message]})) == answer
    levels = [{"label": "low", "description": "b"}, {"label": "high", "description": "a"}]
    score = {"type": "score", "instructions": "How?", "levels": levels}
    [said] = ok(known.post("/v1/decisions", json={"model": "m", "input": "x", "questions": [score]}))["answers"]
    assert said["score"] == pytest.approx(1.0) and [p["label"] for p in said["probabilities"]] == ["low", "high"]


def test_rerank_takes_more_documents_than_a_slate(known):
    documents = ["b", "ab", {"text": "a"}, "aab", "b", "bba"]
    body = {"query": "q", "documents": documents, "top_n": 3}
    answer = ok(known.post("/v1/rerank", json=body))
    assert [r["index"] for r in answer["results"]] == [2, 3, 1]
    assert [r["relevance_score"] for r in answer["results"]] == pytest.approx([1, 2 / 3, 0.5])
    everything = ok(known.post("/v1/rerank", json={**body, "top_n": None, "return_documents": True}))["results"]
    assert len(everything) == 6 and everything[0]["document"] == {"text": "a"}


def test_models_and_health(known):
    listed = ok(known.get("/v1/models"))
    assert listed["models"][0]["name"] == "m" and listed["data"][0]["id"] == "m"
    assert ok(known.get("/health")) == {"status": "ok", "waiting": 0}


def test_texts_that_were_cut_are_told():
    scorer = local_scorer(max_candidate_tokens=4)
    slate = plain_slate("q", "alpha beta gamma delta forms taxes", "x")
    with serving(scorer) as (url, _), ServedScorer(url, "m") as client:
        [answer] = client.yes([slate])
    assert len(answer.notes) == 1 and answer.notes[0].startswith("text of 1 cut from")


def test_confidences_by_hand():
    assert choice_confidence(np.array([0.7, 0.1, 0.2])) == pytest.approx((0.7 - 1 / 3) / (2 / 3))
    assert choice_confidence(np.array([1.0])) == 1.0
    assert score_confidence(np.array([0.8, 0.1, 0.1])) == pytest.approx(1 - (0.1 + 0.2) / 1)
    assert score_confidence(np.full(3, 1 / 3)) == 0.0


# --- wrong requests ----------------------------------------------------------------------------------------------

RERANK = {"query": "q", "documents": ["a"]}
PREDICATE = {"type": "predicate", "instructions": "candidate 1"}


def candidates(*rows):
    return systemone({"query": "q", "candidates": list(rows)}, q=ASK_2)


@pytest.mark.parametrize(
    ("path", "body", "loc", "message"),
    [
        ("systemone", {}, ["model"], "missing"),
        ("systemone", {"model": "m", "state": "s"}, ["questions"], "missing"),
        ("systemone", systemone("s"), ["questions"], "at least one"),
        ("systemone", systemone(5, q=ASK_2), ["state"], "must be text"),
        ("systemone", systemone("s", q=5), ["questions", "q"], "object"),
        ("systemone", systemone("s", q={"type": "box"}), ["questions", "q", "type"], "noul, choice, score"),
        ("systemone", systemone("s", q={"type": "noul"}), ["questions", "q", "instructions"], "missing"),
        ("systemone", systemone("s", q={"type": "choice"}), ["questions", "q", "criteria"], "names"),
        ("systemone", systemone("s", q={"type": "score", "criteria": {}}), ["questions", "q", "criteria"], "levels"),
        ("systemone", {**systemone("s", q=ASK_2), "assets": {}}, ["assets"], "unknown here"),
        (
            "systemone",
            systemone("s", q={"type": "choice", "criteria": {str(n): None for n in range(300)}}),
            ["questions", "q", "criteria"],
            "has 300 options, and may have 1 to 255; ask yes/no about each first",
        ),
        ("systemone", candidates(), ["state", "candidates"], "at least one"),
        ("systemone", candidates("a"), ["state", "candidates", 0], "object with"),
        ("systemone", candidates({"text": 5}), ["state", "candidates", 0, "text"], "must be text"),
        ("systemone", candidates({"title": "t"}), ["state", "candidates", 0, "text"], "missing"),
        ("systemone", candidates({"text": "", "briefly": 1}), ["state", "candidates", 0, "briefly"], "unknown"),
        (
            "systemone",
            candidates({"id": "x", "text": "a"}, {"id": "x", "text": "b"}),
            ["state", "candidates", 1, "id"],
            "id of two candidates",
        ),
        ("systemone", candidates({"text": "a"}), ["questions", "q", "instructions"], "no candidate 2"),
        (
            "systemone",
            systemone(STATE, q={"type": "noul", "instructions": "Is it good?"}),
            ["questions", "q", "instructions"],
            "names one of its ids",
        ),
        (
            "systemone",
            systemone(STATE, q={"type": "choice", "criteria": {"1": None, "2": None}}),
            ["questions", "q"],
            "ids of all its candidates",
        ),
        ("systemone", systemone(STATE, q={"type": "score", "criteria": ["a"]}), ["questions", "q"], "plain state"),
        ("systemone", candidates(*[{"text": "a"}] * 5), [], "a slate of 5 candidates; this model takes 4"),
        ("systemone", candidates(*[{"text": "a" * 60}] * 2), [], "a slate of 120 tokens; this model takes 100"),
        ("decisions", {"model": "m", "input": [], "questions": [PREDICATE]}, ["input"], "list of messages"),
        (
            "decisions",
            {"model": "m", "input": [{"type": "function_call"}], "questions": [PREDICATE]},
            ["input", 0],
            "calls of tools",
        ),
        ("decisions", {"model": "m", "input": "x", "questions": [PREDICATE] * 401}, ["questions"], "1 to 400"),
        ("decisions", {"model": "m", "input": "x", "questions": [{"type": "noul"}]}, ["questions", 0, "type"], "noul"),
        (
            "decisions",
            {"model": "m", "input": "x", "questions": [{**PREDICATE, "type": "choice", "choices": [{"value": "a"}]}]},
            ["questions", 0, "choices"],
            "2 to 255",
        ),
        (
            "decisions",
            {
                "model": "m",
                "input": "x",
                "questions": [{**PREDICATE, "type": "choice", "choices": [{"value": "a"}, {"value": "a"}]}],
            },
            ["questions", 0, "choices", 1],
            "twice",
        ),
        ("rerank", {"documents": ["a"]}, ["query"], "missing"),
        ("rerank", {**RERANK, "documents": []}, ["documents"], "at least one"),
        ("rerank", {**RERANK, "documents": [5]}, ["documents", 0], "must be text"),
        ("rerank", {**RERANK, "top_n": 0}, ["top_n"], "1 or more"),
        ("rerank", {**RERANK, "top_n": True}, ["top_n"], "whole number"),
    ],
)
def test_wrong_requests_are_told_where_and_what(known, path, body, loc, message):
    response = known.post(f"/v1/{path}", json=body)
    assert response.status_code == 422
    [detail] = response.json()["detail"]
    assert detail["loc"] == ["body", *loc] and message in detail["msg"] and detail["type"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"query": "\\ud800", "documents": ["a"]}', b"[" * 10_000, b"1" * 10_000],
)
def test_bodies_that_are_no_json_object(known, body):
    for path in ("systemone", "decisions", "rerank"):
        response = known.post(f"/v1/{path}", content=body)
        assert response.status_code == 422 and response.json()["detail"][0]["loc"] == ["body"]


def test_other_models_paths_and_methods(known):
    response = known.post("/v1/rerank", json={**RERANK, "model": "other"})
    assert response.status_code == 404 and "no model 'other' here, only 'm'" in response.text
    assert known.get("/v1/rerank").status_code == 405 and known.post("/v1/nothing").status_code == 404


def test_large_bodies_are_refused(known):
    response = known.post("/v1/rerank", json={**RERANK, "documents": ["a" * 40_000]})
    assert response.status_code == 413 and "more than 40000 bytes" in response.text

    def endless():
        for _ in range(200):
            yield b"a" * 1000

    # Without a length the server finds out while it reads; it may close before all is sent.
    try:
        assert known.post("/v1/rerank", content=endless()).status_code == 413
    except httpx.WriteError:
        pass
    assert ok(known.post("/v1/rerank", json=RERANK))


# --- batches -----------------------------------------------------------------------------------------------------


def rerank_in_thread(pool, url, query, text="a"):
    return pool.submit(httpx.post, f"{url}/v1/rerank", json={"query": query, "documents": [text]}, timeout=20)


def wait_for(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def waiting(url):
    return httpx.get(f"{url}/health").json()["waiting"]


def test_what_waits_together_is_asked_together():
    hold = threading.Event()
    scorer = Known(hold)
    with serving(scorer) as (url, _), ThreadPoolExecutor(8) as pool:
        first = rerank_in_thread(pool, url, "first")
        assert scorer.began.wait(10)
        others = [rerank_in_thread(pool, url, f"q{n}", "a" * n + "b") for n in range(6)]
        wait_for(lambda: waiting(url) == 6)
        hold.set()
        scores = [ok(f.result())["results"][0]["relevance_score"] for f in others]
        ok(first.result())
    assert [len(call) for call in scorer.calls] == [1, 6]
    assert scores == pytest.approx([n / (n + 1) for n in range(6)])


def test_batches_keep_to_the_budget_of_tokens():
    hold = threading.Event()
    scorer = Known(hold)
    with serving(scorer, max_tokens=50) as (url, _), ThreadPoolExecutor(8) as pool:
        futures = [rerank_in_thread(pool, url, "first")]
        assert scorer.began.wait(10)
        futures += [rerank_in_thread(pool, url, f"q{n}", "a" * 20) for n in range(5)]
        wait_for(lambda: waiting(url) == 5)
        hold.set()
        for future in futures:
            ok(future.result())
    assert [len(call) for call in scorer.calls] == [1, 2, 2, 1]


def test_a_failing_request_spoils_no_other():
    hold = threading.Event()
    scorer = Known(hold, fail={"bad"})
    with serving(scorer) as (url, _), ThreadPoolExecutor(8) as pool:
        futures = [rerank_in_thread(pool, url, "first")]
        assert scorer.began.wait(10)
        bad = rerank_in_thread(pool, url, "bad")
        futures += [rerank_in_thread(pool, url, f"q{n}") for n in range(3)]
        wait_for(lambda: waiting(url) == 4)
        hold.set()
        for future in futures:
            ok(future.result())
        assert bad.result().status_code == 500 and "cannot say bad" in bad.result().text
        ok(httpx.post(f"{url}/v1/rerank", json=RERANK))


def test_a_full_queue_says_come_back():
    hold = threading.Event()
    scorer = Known(hold)
    with serving(scorer, max_waiting=2) as (url, app), ThreadPoolExecutor(8) as pool:
        futures = [rerank_in_thread(pool, url, "first")]
        assert scorer.began.wait(10)
        futures += [rerank_in_thread(pool, url, f"q{n}") for n in range(2)]
        wait_for(lambda: waiting(url) == 2)
        refused = httpx.post(f"{url}/v1/rerank", json=RERANK)
        assert (
            refused.status_code == 503 and refused.headers["retry-after"] == "1" and "2 requests wait" in refused.text
        )
        hold.set()
        for future in futures:
            ok(future.result())


def test_clients_that_go_away_drop_their_work():
    hold = threading.Event()
    scorer = Known(hold)
    # No wrapper around the app: it must see the connection itself.
    with running(decision_app(scorer, name="m")) as url, ThreadPoolExecutor(2) as pool:
        first = rerank_in_thread(pool, url, "first")
        assert scorer.began.wait(10)
        body = json.dumps({"query": "gone", "documents": ["a"]})
        address = url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as raw:
            head = f"POST /v1/rerank HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall((head + body).encode())
            wait_for(lambda: waiting(url) == 1)
        time.sleep(0.3)  # the server notices in its own time
        hold.set()
        ok(first.result())
        ok(httpx.post(f"{url}/v1/rerank", json={"query": "last", "documents": ["a"]}))
    assert [s.query for call in scorer.calls for s in call] == ["first", "last"]


def workers():
    return {thread for thread in threading.enumerate() if thread.name == "decision-model"}


def test_stopping_answers_what_was_accepted():
    hold, before = threading.Event(), workers()
    scorer = Known(hold)
    with ThreadPoolExecutor(8) as pool:
        with running(decision_app(scorer, name="m")) as url:
            futures = [rerank_in_thread(pool, url, "first")]
            assert scorer.began.wait(10)
            futures += [rerank_in_thread(pool, url, f"q{n}") for n in range(4)]
            wait_for(lambda: waiting(url) == 4)
            threading.Timer(0.5, hold.set).start()
        for future in futures:
            ok(future.result())
    assert workers() == before
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_two_hundred_clients_lose_nothing(local):
    slates = [plain_slate(f"question {n}", f"alpha {n}", "beta gamma", f"delta {n * 7}") for n in range(200)]
    expected = [answer.values_C for answer in local.yes(slates)]
    gate = threading.Barrier(200)

    def ask(n):
        with ServedScorer(url, "m", options=ServedOptions(retries=0)) as client:
            gate.wait(60)
            return client.yes([slates[n]])[0].values_C

    with running(decision_app(local, name="m")) as url, ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    np.testing.assert_allclose(answers, expected, atol=1e-5)
    assert len({tuple(v) for v in expected}) == 200
