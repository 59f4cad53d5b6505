"""The state of every random generator that a model or an objective may draw from, as JSON."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int, *parts: int) -> None:
    """Seed Python, NumPy and PyTorch (all devices) with independent numbers drawn from (seed, *parts)."""
    one, two, three = np.random.SeedSequence([seed, *parts]).generate_state(3, np.uint32).tolist()
    random.seed(one)
    np.random.seed(two)
    torch.manual_seed(three)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's and PyTorch's global generators, and of the current CUDA device's."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` gave (also after a trip through JSON)."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Whatever is drawn inside, the generators continue outside as if nothing had been."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
