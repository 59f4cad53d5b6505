"""A decision model behind the endpoints of decision servers: `/v1/systemone`, `/v1/decisions`, `/v1/rerank`.

What questions mean is in `server_plan`. A wrong request is answered 4xx with `detail`, a list of {loc, msg, type}.
There is no authentication.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..protocols import DecisionScorer, SlateScores
from .server_plan import Plan, plan_decisions, plan_rerank, plan_systemone
from .server_queue import BatchWorker, QueueFull, TooLarge
from .wire import Malformed

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

Handler = Callable[["Request"], Awaitable["Response"]]

_RETRY_AFTER_S = 1
_log = logging.getLogger(__name__)

PLANS: dict[str, Callable[[Mapping[str, Any], str], Plan]] = {
    "/v1/systemone": plan_systemone,
    "/v1/decisions": plan_decisions,
    "/v1/rerank": plan_rerank,
}


class _BodyTooLarge(Exception):
    """A body above the limit."""


def decision_app(
    scorer: DecisionScorer,
    *,
    name: str,
    max_body_bytes: int = 4 * 2**20,
    max_tokens: int = 32_768,
    max_waiting: int = 512,
) -> Starlette:
    """An ASGI application that answers with `scorer`, which only its worker thread uses while it runs.

    name: the model's name; requests for another one are refused (404).
    max_body_bytes: longer requests are refused (413).
    max_tokens, max_waiting: see `BatchWorker`; requests beyond `max_waiting` are answered 503.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.worker = BatchWorker(scorer, max_tokens=max_tokens, max_waiting=max_waiting)
        yield
        await asyncio.to_thread(app.state.worker.close)

    async def models(request: Request) -> Response:
        about = "decision model of retrail"
        listed = {"name": name, "description": about, "release_date": datetime.now(UTC).date().isoformat()}
        data = [{"id": name, "object": "model", "owned_by": "retrail"}]
        return JSONResponse({"object": "list", "data": data, "models": [listed]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "waiting": len(request.app.state.worker)})

    posts = [Route(path, _endpoint(plan, name, max_body_bytes), methods=["POST"]) for path, plan in PLANS.items()]
    gets = [Route("/v1/models", models), Route("/health", health)]
    return Starlette(routes=[*posts, *gets], lifespan=lifespan)


def _endpoint(plan: Callable[[Mapping[str, Any], str], Plan], name: str, max_body_bytes: int) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            body = _parsed(await _body(request, max_body_bytes))
            if body.get("model", name) != name:
                return _error(404, ("model",), f"there is no model {body['model']!r} here, only {name!r}", "not_found")
            planned = plan(body, name)
        except _BodyTooLarge:
            return _error(413, (), f"the body has more than {max_body_bytes} bytes; split the request", "too_large")
        except Malformed as error:
            return _error(422, error.loc, str(error), "missing" if str(error) == "missing" else "value_error")
        return await _answered(request, planned)

    return handle


async def _body(request: Request, limit: int) -> bytes:
    """The whole body; stops reading where it grows beyond the limit."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _BodyTooLarge
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _BodyTooLarge
        parts.append(part)
    return b"".join(parts)


def _parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Malformed, also for text that no tokenizer can read."""
    try:
        parsed = json.loads(body)
        # Escapes can write halves of characters, which are no text.
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed((), f"the body is no JSON in UTF-8: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise Malformed((), "the body must be a JSON object")
    return parsed


async def _answered(request: Request, plan: Plan) -> Response:
    """The response to a good request, or nothing for a client that went away: its work is dropped."""
    from starlette.responses import JSONResponse, Response

    try:
        future = asyncio.wrap_future(request.app.state.worker.submit(plan.asks))
    except QueueFull as error:
        response = _error(503, (), f"{error}; ask again later", "overloaded")
        response.headers["retry-after"] = str(_RETRY_AFTER_S)
        return response
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            future.cancel()
            return Response(status_code=499)
        answers: list[SlateScores] = future.result()
    except TooLarge as error:
        return _error(422, (), str(error), "too_large")
    except (ValueError, FloatingPointError) as error:  # of the model: a wrong request does not get so far
        _log.error("the model failed: %s", error)
        return _error(500, (), str(error), "model_error")
    except Exception:
        _log.exception("the model failed")
        return _error(500, (), "the model failed; the log of the server says how", "model_error")
    finally:
        gone.cancel()
    return JSONResponse(plan.respond(answers))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, loc: tuple[str | int, ...], message: str, kind: str) -> JSONResponse:
    from starlette.responses import JSONResponse

    return JSONResponse({"detail": [{"loc": ["body", *loc], "msg": message, "type": kind}]}, status_code=status)
