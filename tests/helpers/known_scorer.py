"""A scorer for servers whose answers are known beforehand, and that can be made to wait or fail."""

import threading

import numpy as np
from fakes import COST

from retrail.models.protocols import SlateScores

RERANK = {"query": "q", "documents": ["a"]}


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


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()
