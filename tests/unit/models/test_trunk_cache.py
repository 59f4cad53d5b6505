"""Trunks that come back are kept in memory, the latest ones."""

import torch
from fakes import make_slate
from static_toy import CANDIDATES, QUERIES, first, same

from retrail.models.decision.scorer import LocalScorer
from retrail.models.decision.trunks import TrunkCache, TrunkMemory, trunk_key
from retrail.models.protocols import Slate


def memory_of(num_bytes):
    return TrunkMemory((), torch.zeros(num_bytes, dtype=torch.uint8))


def test_cache_lets_go_of_what_was_not_used_for_longest():
    cache = TrunkCache(100)
    for key in "ab":
        cache.put(key, memory_of(40))
    assert cache.get("a") is not None  # so b is the oldest now
    cache.put("c", memory_of(60))
    assert cache.get("b") is None and cache.get("a") is not None and cache.get("c") is not None
    assert cache.num_bytes == 100
    cache.put("huge", memory_of(101))
    assert cache.get("huge") is None and cache.num_bytes == 100
    cache.put("a", memory_of(40))
    assert cache.num_bytes == 100
    assert not cache.returns("x") and cache.returns("x")


def test_candidates_that_come_back_are_read_twice_and_no_more():
    model, layout = first()
    plain, cached = LocalScorer(model, layout), LocalScorer(model, layout, trunk_cache_bytes=10**6)
    trunk = len(layout.pack(["?"], CANDIDATES[0]).trunk)
    costs = []
    for query in QUERIES:
        slates = [Slate(query, CANDIDATES[0]), Slate(query, make_slate(2, seed=len(query)).candidates)]
        answers = cached.yes(slates)
        same(answers, plain.yes(slates))
        costs.append(answers[0].cost)
        assert answers[1].cost.reused_tokens == 0
    assert [cost.reused_tokens for cost in costs] == [0, 0, trunk, trunk]
    assert costs[1].prompt_tokens > trunk > costs[2].prompt_tokens
    assert cached._cache.num_bytes == cached._cache.get(trunk_key(layout.pack(["?"], CANDIDATES[0]))).num_bytes
