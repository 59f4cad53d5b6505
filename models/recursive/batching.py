"""Which texts share a forward pass: sorted by tokens, within a budget of tokens, with little padding.

Shapes: N texts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from ...data_prep.hits import Cost

# A batch ends before its shortest text would be padded by more than this share of the longest.
_MOST_PADDING = 0.2
_TOKENISED_AT_ONCE = 16_384


def token_batches(lengths: Sequence[int], max_tokens: int, max_rows: int | None = None) -> list[list[int]]:
    """Positions of texts, batch by batch, longest texts first, so that the largest batch comes first.

    Rows times the longest text of a batch is at most `max_tokens`; a text longer than that is a batch of its own. Texts
    of one length keep their order.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    longest = 0
    for position in order:
        full = batches and (
            (len(batches[-1]) + 1) * longest > max_tokens
            or len(batches[-1]) == max_rows
            or lengths[position] < (1 - _MOST_PADDING) * longest
        )
        if not batches or full:
            batches.append([])
            longest = lengths[position]
        batches[-1].append(position)
    return batches


@dataclass(frozen=True, slots=True)
class Distinct:
    """Of some keys, where the distinct ones first stand, and which of those each key is."""

    first: list[int]
    inverse: list[int]


def distinct(keys: Sequence[Hashable]) -> Distinct:
    """Texts with the same tokens are encoded once: they get the same vector to the bit, hence tie exactly."""
    number: dict[Hashable, int] = {}
    first: list[int] = []
    inverse: list[int] = []
    for position, key in enumerate(keys):
        if key not in number:
            number[key] = len(first)
            first.append(position)
        inverse.append(number[key])
    return Distinct(first, inverse)


def encode_distinct(
    token_lists: Sequence[list[int]],
    forward: Callable[[list[list[int]]], np.ndarray],
    dim: int,
    *,
    max_tokens: int,
    max_rows: int | None = None,
    done: Callable[[int], object] | None = None,
) -> tuple[np.ndarray, list[Cost]]:
    """Vectors, float32 (N, D), and costs of complete id lists, in the order given.

    Args:
        token_lists: ids of each text; only the first of equal lists is encoded, and costs anything.
        forward: vectors of the texts of one batch.
        dim: D.
        max_tokens: as `token_batches`.
        max_rows: as `token_batches`.
        done: told after each pass how many texts it held.
    """
    same = distinct([tuple(ids) for ids in token_lists])
    lists = [token_lists[n] for n in same.first]
    vectors_ND = np.empty((len(lists), dim), np.float32)
    costs = [Cost()] * len(token_lists)
    for batch in token_batches([len(ids) for ids in lists], max_tokens, max_rows):
        started = perf_counter()
        vectors_ND[batch] = forward([lists[n] for n in batch])
        seconds, total = perf_counter() - started, sum(len(lists[n]) for n in batch)
        for place, n in enumerate(batch):
            # One pass for all of them: it is counted with the first.
            share = seconds * len(lists[n]) / total
            costs[same.first[n]] = Cost(forwards=int(place == 0), prompt_tokens=len(lists[n]), seconds=share)
        if done is not None:
            done(len(batch))
    return vectors_ND[same.inverse], costs


def encode_texts(
    texts: Sequence[str],
    dim: int,
    tokens: Callable[[str], list[int]],
    encode: Callable[[Sequence[list[int]], Callable[[int], object]], tuple[np.ndarray, list[Cost]]],
    *,
    progress: bool,
) -> np.ndarray:
    """Vectors, float32 (N, D), of documents, of which only so many are tokens at a time.

    Args:
        texts: documents, of which no two are equal.
        dim: D.
        tokens: the ids of a text.
        encode: as `encode_distinct`, of id lists and `done`.
        progress: show how many are done.
    """
    from tqdm import tqdm

    vectors_ND = np.empty((len(texts), dim), np.float32)
    with tqdm(total=len(texts), desc="documents", unit="doc", disable=not progress) as bar:
        for start in range(0, len(texts), _TOKENISED_AT_ONCE):
            lists = [tokens(text) for text in texts[start : start + _TOKENISED_AT_ONCE]]
            vectors_ND[start : start + len(lists)], _ = encode(lists, bar.update)
    return vectors_ND


def scaled(costs: Sequence[Cost], seconds: float) -> list[Cost]:
    """Costs whose seconds add up to `seconds`: rendering and tokenising count as well."""
    spent = sum(cost.seconds for cost in costs)
    return [replace(cost, seconds=cost.seconds * seconds / spent if spent else 0.0) for cost in costs]


def check_vectors(vectors_ND: np.ndarray, name: Callable[[int], str]) -> None:
    """Raise ValueError that names the first text whose vector is not finite, or zero."""
    length_N = np.linalg.norm(vectors_ND, axis=1)
    bad = np.flatnonzero(~np.isfinite(length_N) | (length_N == 0))
    if len(bad):
        row = int(bad[0])
        kind = "zero" if length_N[row] == 0 else "not finite"
        raise ValueError(
            f"the vector of {name(row)} is {kind} ({len(bad)} of {len(vectors_ND)} vectors are bad): with float16 try "
            "model.dtype=bfloat16 or float32, otherwise check the model's weights"
        )
