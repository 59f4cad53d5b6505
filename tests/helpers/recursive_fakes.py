"""Encoders that know nothing: a state's vector is a hash of its words, mixed with what it observed."""

import numpy as np

from retrail.data_prep.hits import Cost
from retrail.models.protocols import StateVectors


def hashed(text: str, dim: int) -> np.ndarray:
    """A unit vector that depends on the text alone."""
    vector = np.random.default_rng(list(text.encode("utf-8", "surrogatepass")) or [0]).standard_normal(dim)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


class HashEncoder:
    """A `StateEncoder`. Observed documents pull the vector towards them, so that searches go somewhere."""

    def __init__(self, dim=16):
        self.dim = dim
        self.contract = {"model": "hash", "dim": dim}
        self.calls, self.forgotten = [], []

    def vector(self, state) -> np.ndarray:
        head = f"{state.role}|{state.instruction}|{state.query}"
        total = hashed(head, self.dim).astype(np.float64)
        for n, text in enumerate(state.observed):
            total = total + 0.5 * (n + 1) * hashed(text, self.dim)
        return (total / np.linalg.norm(total)).astype(np.float32)

    def encode(self, states):
        self.calls.append(len(states))
        vectors = np.stack([self.vector(state) for state in states]) if states else np.zeros((0, self.dim), np.float32)
        costs = tuple(Cost(forwards=1, prompt_tokens=10 * (1 + len(s.observed)), seconds=0.0) for s in states)
        return StateVectors(vectors, costs, tuple(() for _ in states))

    def encode_documents(self, texts, *, progress=False):
        return np.stack([hashed(text, self.dim) for text in texts]) if texts else np.zeros((0, self.dim), np.float32)

    def session(self):
        return _Session(self)


class _Session:
    def __init__(self, encoder):
        self.encoder = encoder

    def encode(self, states, owners):
        assert len(states) == len(owners)
        return self.encoder.encode(states)

    def forget(self, owner):
        self.encoder.forgotten.append(owner)
