"""POST to a decision server: few requests at a time, each with a deadline, repeated where that can help.

The key is read from the environment and kept in the headers of the HTTP client alone.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..config import ServedOptions

if TYPE_CHECKING:
    from httpx import Response

MAX_IN_FLIGHT = 8

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0
_LARGEST_ANSWER = 32 * 2**20
_SHOWN = 300


class ServedError(RuntimeError):
    """A server did not answer. `retry_after`: after how many seconds it wants to be asked again, where it said so."""

    retry_after: float | None = None


class ServerRefused(ServedError):
    """The server says that the request is wrong (4xx), or that it lives elsewhere (3xx)."""


class RateLimited(ServedError):
    """Too many requests (429), still after the last try."""


class ServerFailed(ServedError):
    """The server failed (5xx), cannot be reached, or cut the connection, still after the last try."""


class Timeout(ServedError):
    """No whole answer within `timeout` seconds, still after the last try."""


class BadAnswer(ServedError):
    """An answer that is no JSON, lacks something, or holds what cannot be a probability."""


class Abandoned(ServedError):
    """Not asked again, or at all, because another request of the same call failed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A JSON object, as text and parsed; how many tries it took, how long, and how many requests were in flight."""

    text: str
    parsed: dict[str, Any]
    tries: int
    seconds: float
    in_flight: int


class Endpoint:
    """One server. Safe for threads; at most `MAX_IN_FLIGHT` requests of all of them run together.

    Raises:
        ValueError: a URL that is none or holds a password, or a key that no header can carry.
    """

    def __init__(self, url: str, options: ServedOptions) -> None:
        """`url`: the base, without `/v1/...`."""
        import httpx

        self.url, host = _base(url)
        self.options = options
        self._slots, self._lock, self._in_flight = threading.Semaphore(MAX_IN_FLIGHT), threading.Lock(), 0
        key = _read_key(options.key_env)
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=options.timeout,
            limits=httpx.Limits(max_connections=MAX_IN_FLIGHT),
            # Without TLS there is nothing to verify, and reading all certificates takes longer than many requests.
            verify=self.url.startswith("https:"),
            # A proxy from the environment cannot reach this machine's own servers.
            trust_env=not _is_loopback(host),
        )

    def post(self, path: str, body: str, stop: threading.Event) -> Reply:
        """The answer to one request; waits and tries again after 429, 5xx, cut connections and timeouts.

        stop: once it is set no further try is made.

        Raises:
            ServedError: one of its kinds; the message names the URL.
        """
        waits = random.Random(body)
        start, busiest = time.perf_counter(), 0
        for tries in range(1, self.options.retries + 2):
            if stop.is_set():
                raise Abandoned(f"{self.url}{path}: not asked, because another request failed")
            with self._slot() as in_flight:
                busiest = max(busiest, in_flight)
                try:
                    text, parsed = self._once(path, body, tries)
                    return Reply(text, parsed, tries, time.perf_counter() - start, busiest)
                except (RateLimited, ServerFailed, Timeout) as error:
                    pause = _FIRST_WAIT_S * 2 ** (tries - 1) * waits.uniform(0.5, 1.0)
                    if error.retry_after is not None:
                        pause = max(pause, error.retry_after)
                    if tries > self.options.retries or pause > _LONGEST_WAIT_S:
                        raise
            stop.wait(pause)
        raise AssertionError("the last try returns or raises")

    def quote(self, text: str) -> str:
        """The beginning of what a server sent, without the key."""
        key = self._client.headers.get("authorization", "").removeprefix("Bearer ")
        shown = (text.replace(key, "***") if key else text)[: _SHOWN + 1]
        return repr(shown[:_SHOWN]) + ("..." if len(shown) > _SHOWN else "")

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    @contextmanager
    def _slot(self) -> Iterator[int]:
        """A place among the requests in flight; yields how many there are with it."""
        with self._slots:
            with self._lock:
                self._in_flight += 1
                now = self._in_flight
            try:
                yield now
            finally:
                with self._lock:
                    self._in_flight -= 1

    def _once(self, path: str, body: str, tries: int) -> tuple[str, dict[str, Any]]:
        import httpx

        url, after = f"{self.url}{path}", f" (try {tries} of {self.options.retries + 1})"
        try:
            response, text = self._send(url, body, after)
        except httpx.TimeoutException as error:
            raise Timeout(f"{url}: no answer within {self.options.timeout:g} s{after}; raise served.timeout") from error
        except httpx.HTTPError as error:
            what = self.quote(str(error) or type(error).__name__)
            raise ServerFailed(f"{url}: cannot be reached or cut the connection{after}: {what}") from error
        if not response.is_success:
            raise self._refusal(url, response, text, after)
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadAnswer(f"{url}: the answer is no JSON; it begins {self.quote(text)}") from error
        if not isinstance(parsed, dict):
            raise BadAnswer(f"{url}: the answer is no JSON object; it begins {self.quote(text)}")
        return text, parsed

    def _send(self, url: str, body: str, after: str) -> tuple[Response, str]:
        """Status and text. A deadline for the whole answer, because the client's own only limits each wait for more."""
        deadline = time.perf_counter() + self.options.timeout
        parts, size = [], 0
        headers = {"content-type": "application/json", "accept": "application/json"}
        with self._client.stream("POST", url, content=body.encode(), headers=headers) as response:
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                if time.perf_counter() > deadline:
                    limit = self.options.timeout
                    raise Timeout(f"{url}: no whole answer within {limit:g} s{after}; raise served.timeout")
                if size > _LARGEST_ANSWER:
                    raise BadAnswer(f"{url}: the answer has more than {_LARGEST_ANSWER} bytes")
        return response, b"".join(parts).decode("utf-8", errors="replace")

    def _refusal(self, url: str, response: Response, text: str, after: str) -> ServedError:
        status = response.status_code
        said = f"{url}: HTTP {status}{after}: {self.quote(_detail(text))}"
        error: ServedError
        if status == 429:
            error = RateLimited(f"{said}; wait, or ask for a higher limit")
        elif status >= 500 or status == 408:
            error = ServerFailed(said)
        elif status in (401, 403):
            error = ServerRefused(f"{said}; put the key into the environment variable {self.options.key_env}")
        elif status < 400:
            error = ServerRefused(f"{said}; use the address that it redirects to")
        else:
            error = ServerRefused(said)
        error.retry_after = _retry_after(response.headers)
        return error


def _base(url: str) -> tuple[str, str]:
    """The URL without a slash at its end, and its host."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no address of a server; write it like http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"the address of {parts.hostname} may hold no user, password, query or fragment; keys come from the "
            "environment (served.key_env)"
        )
    return url.rstrip("/").removesuffix("/v1"), parts.hostname


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_key(name: str) -> str:
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {name} holds characters that no HTTP header can carry")
    return key


def _detail(text: str) -> str:
    """What the server says about an error, out of the usual places."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(said, dict):
        said = said.get("detail", said.get("error", said))
    if isinstance(said, dict):
        said = said.get("message", said)
    if isinstance(said, list):
        return "; ".join(_one_detail(item) for item in said)
    return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def _one_detail(item: object) -> str:
    if isinstance(item, dict) and isinstance(item.get("loc"), list):
        return f"{'.'.join(map(str, item['loc']))}: {item.get('msg')}"
    return str(item)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until the server wants to be asked again: it may tell a number or a date."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
