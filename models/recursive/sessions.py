"""Sessions of a search: with what states share remembered, or without.

Shapes: S states, D dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ...data_prep.hits import Cost
from ..protocols import State, StateEncoder, StateVectors
from .batching import check_vectors
from .pooling import finish
from .prefix_cache import PrefixSession, unsupported

if TYPE_CHECKING:
    from .encoder import LocalEncoder


class TokenSession(Protocol):
    """Encodes lists of token ids and remembers what their owners' lists begin with."""

    def encode(
        self, token_lists: list[list[int]], owners: list[int]
    ) -> tuple[np.ndarray, Sequence[int], Sequence[int]]:
        """Vectors float32 (S, D), and of each list how many tokens were computed and how many reused."""
        ...

    def forget(self, owner: int) -> None:
        """Free what is remembered for an owner."""
        ...


class PlainSession:
    """Remembers nothing: each state is encoded whole."""

    def __init__(self, encoder: StateEncoder) -> None:
        self._encoder = encoder

    def encode(self, states: Sequence[State], owners: Sequence[int]) -> StateVectors:
        """See `EncoderSession`."""
        _check_owners(states, owners)
        return self._encoder.encode(states)

    def forget(self, owner: int) -> None:
        """Nothing is remembered."""


class CachedSession:
    """Renders as its encoder does, and leaves the rest to a session over tokens."""

    def __init__(self, encoder: LocalEncoder, tokens: TokenSession) -> None:
        self._encoder, self._tokens = encoder, tokens

    def encode(self, states: Sequence[State], owners: Sequence[int]) -> StateVectors:
        """See `EncoderSession`."""
        _check_owners(states, owners)
        started = time.perf_counter()
        fitted = [self._encoder.prepare(state) for state in states]
        with self._encoder.reading():
            vectors, computed, reused = self._tokens.encode([f.ids for f in fitted], list(owners))
        vectors = finish(torch.from_numpy(vectors), self._encoder.config.dimensions).numpy()
        check_vectors(vectors, lambda n: f"state {n} ({states[n].role} of the query {states[n].query[:80]!r})")
        seconds, total = time.perf_counter() - started, max(1, sum(computed))
        costs = tuple(
            Cost(forwards=int(n == 0), prompt_tokens=own, reused_tokens=old, seconds=seconds * own / total)
            for n, (own, old) in enumerate(zip(computed, reused, strict=True))
        )
        return StateVectors(vectors, costs, tuple(f.notes for f in fitted))

    def forget(self, owner: int) -> None:
        """See `EncoderSession`."""
        self._tokens.forget(owner)


def prefix_session(backbone: Any) -> TokenSession | None:
    """A fresh prefix session of the model; None: this model's layers keep something else than keys and values."""
    return None if unsupported(backbone) else PrefixSession(backbone)


def _check_owners(states: Sequence[State], owners: Sequence[int]) -> None:
    if len(states) != len(owners):
        raise ValueError(f"{len(states)} states but {len(owners)} owners")
