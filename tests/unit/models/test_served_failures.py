"""`ServedScorer` when servers fail, its key, and its cache."""

import logging
import threading

import numpy as np
import pytest
from fakes import make_slate
from http_servers import local_scorer, serving
from served_client import Gauge, client, drop_one, without_key_or_waits

from retrail.models.config import ServedOptions
from retrail.models.decision import served_http
from retrail.models.decision.served import ServedScorer
from retrail.models.decision.served_http import (
    BadAnswer,
    RateLimited,
    ServedError,
    ServerFailed,
    ServerRefused,
    Timeout,
)

SLATES = [make_slate(size, seed) for seed in range(2) for size in (5, 1, 7)]
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    without_key_or_waits(monkeypatch)


@pytest.fixture(scope="module")
def local():
    return local_scorer()


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
