"""A client of decision servers for tests, a scorer to serve, and an answer with a hole in it."""

import numpy as np
from fakes import COST

from retrail.models.config import ServedOptions
from retrail.models.decision import served_http
from retrail.models.decision.served import ServedScorer
from retrail.models.protocols import SlateScores


def without_key_or_waits(monkeypatch):
    """Tries come quickly one after the other, and no key of the machine is sent."""
    monkeypatch.setattr(served_http, "_FIRST_WAIT_S", 0.01)
    monkeypatch.delenv("RETRAIL_API_KEY", raising=False)


def client(url, protocol="systemone", *, retries=2, timeout=10.0, **options):
    return ServedScorer(url, "m", protocol, ServedOptions(retries=retries, timeout=timeout, **options))


def drop_one(answer):
    rows = answer.get("results", answer.get("answers"))
    rows.pop("2") if isinstance(rows, dict) else rows.pop(1)
    return answer


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
