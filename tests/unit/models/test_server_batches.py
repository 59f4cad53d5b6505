"""The decision app under load: batches across requests, full queues, clients that go, and its end."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from http_servers import local_scorer, plain_slate, running, serving
from known_scorer import RERANK, Known, ok

from retrail.models.config import ServedOptions
from retrail.models.decision.served import ServedScorer
from retrail.models.decision.server import decision_app


@pytest.fixture(scope="module")
def local():
    return local_scorer()


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
