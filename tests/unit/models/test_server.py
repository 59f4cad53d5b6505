"""The decision app over real HTTP: what it answers to good requests, and to wrong ones."""

import json

import httpx
import numpy as np
import pytest
from fakes import COST, make_slate
from http_servers import local_scorer, plain_slate, running, serving
from known_scorer import RERANK, Known, ok

from retrail.models.decision.served import ServedScorer
from retrail.models.decision.server import decision_app
from retrail.models.decision.server_plan import choice_confidence, score_confidence
from retrail.models.protocols import Candidate, Slate


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
