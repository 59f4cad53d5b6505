"""Real HTTP servers on this machine: the decision app with a scorer behind it, and faults on the way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import uvicorn
from decision_toy import tiny_decision

from retrail.models.decision.scorer import LocalScorer
from retrail.models.decision.server import decision_app
from retrail.models.protocols import Candidate, Slate


def local_scorer(**decision: object) -> LocalScorer:
    """The tiny model with a pointer head that tells candidates apart, the same each time."""
    model, layout = tiny_decision(**decision)
    if model.head is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            torch.nn.init.normal_(model.head.relevance.weight)
        model.head.log_scale.data.zero_()
        model.head.relevance.bias.data.zero_()
    return LocalScorer(model, layout)


def plain_slate(query: str, *texts: str) -> Slate:
    return Slate(query, tuple(Candidate(f"node/{n}", "", text) for n, text in enumerate(texts)))


@contextmanager
def running(app) -> Iterator[str]:
    """The address of `app` while it runs in a thread of its own, on a free port."""
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on", timeout_graceful_shutdown=10)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for _ in range(1000):
            if server.started or not thread.is_alive():
                break
            threading.Event().wait(0.01)
        [listener] = server.servers[0].sockets
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def serving(scorer=None, faults=(), **options) -> Iterator[tuple[str, Faults]]:
    """The decision app behind `faults`: its address, and what came in."""
    app = Faults(decision_app(scorer or local_scorer(), name="m", **options), faults)
    with running(app) as url:
        yield url, app


class Faults:
    """An ASGI app that treats the n-th POST as the n-th of `faults` says; later ones pass.

    A fault is None, (status, headers, body), a number of seconds to wait, "cut", or a function that changes the answer.
    `requests` holds (headers, parsed body) of each POST.
    """

    def __init__(self, app, faults) -> None:
        self.app, self.faults, self.requests = app, list(faults), []

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        fault = self.faults.pop(0) if self.faults else None
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.requests.append(({k.decode(): v.decode() for k, v in scope["headers"]}, json.loads(body)))
        if isinstance(fault, tuple):
            return await _send(send, *fault)
        if fault == "cut":
            headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            return await send({"type": "http.response.body", "body": b'{"answers": {"1":'})
        if isinstance(fault, float):
            await asyncio.sleep(fault)
        return await self._pass_on(scope, body, receive, send, fault if callable(fault) else None)

    async def _pass_on(self, scope, body, receive, send, change) -> None:
        sent = [{"type": "http.request", "body": body, "more_body": False}]
        answers = []

        async def replay():
            return sent.pop() if sent else await receive()

        async def keep(message):
            answers.append(message)

        await self.app(scope, replay, keep)
        text = b"".join(m.get("body", b"") for m in answers)
        if change is not None:
            changed = change(json.loads(text))
            text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        headers = {k.decode(): v.decode() for k, v in answers[0]["headers"] if k != b"content-length"}
        await _send(send, answers[0]["status"], headers, text)


async def _send(send, status, headers, body) -> None:
    body = body if isinstance(body, bytes) else body.encode()
    pairs = [(k.encode(), v.encode()) for k, v in headers.items()] + [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
