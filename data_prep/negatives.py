"""Hard negatives from any ranking: one small rule a function, to be chained in the order the caller wants.

ids = rank_window(hits.ids, 10, 100)
ids = drop_ids(ids, gold)
ids = drop_same_text(ids, gold, corpus)
ids = sample(ids, 7, random.Random(seed))
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .corpus import Corpus

T = TypeVar("T")


def rank_window(ids: Sequence[str], first: int, last: int) -> list[str]:
    """The ids on ranks `first` to `last`, both included, counted from 1.

    The very best ranks often hold unjudged right answers; a later start trades hardness for fewer of them.

    Raises:
        ValueError: `first` below 1 or `last` below `first`.
    """
    if not 1 <= first <= last:
        raise ValueError(f"ranks {first} to {last} are no window; use 1 <= first <= last")
    return list(ids[first - 1 : last])


def interleave(rankings: Iterable[Sequence[T]]) -> list[T]:
    """Each id once: the first of every ranking in turn, then the second of every ranking, and so on."""
    return list(dict.fromkeys(node_id for row in zip_longest(*rankings) for node_id in row if node_id is not None))


def drop_ids(ids: Iterable[str], unwanted: Collection[str]) -> list[str]:
    """The ids that are not among `unwanted` (the gold ones), in order."""
    unwanted = frozenset(unwanted)
    return [node_id for node_id in ids if node_id not in unwanted]


def drop_same_text(ids: Iterable[str], gold: Iterable[str], corpus: Corpus) -> list[str]:
    """The ids whose text, white space and case aside, is no gold text: a copy of an answer is no negative.

    Raises:
        KeyError: an id that the corpus lacks.
    """
    right = {_normalised(corpus, node_id) for node_id in gold}
    return [node_id for node_id in ids if _normalised(corpus, node_id) not in right]


def _normalised(corpus: Corpus, node_id: str) -> str:
    return " ".join(corpus.text(corpus.row(node_id)).casefold().split())


def drop_relatives(ids: Iterable[str], gold: Iterable[str], corpus: Corpus) -> list[str]:
    """The ids that are neither an ancestor nor a descendant of a gold node (which hold, or are held by, the answer).

    Raises:
        KeyError: an id that the corpus lacks.
    """
    rows = {corpus.row(node_id) for node_id in gold}
    above = {row for gold_row in rows for row in corpus.path(gold_row)}
    kept = []
    for node_id in ids:
        row = corpus.row(node_id)
        if row not in above and rows.isdisjoint(corpus.path(row)):
            kept.append(node_id)
    return kept


def sample(ids: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` of the ids drawn without repetition (all of them, where there are fewer), in their ranking's order.

    Raises:
        ValueError: a negative count.
    """
    if count < 0:
        raise ValueError(f"count={count} must be 0 or more")
    if count >= len(ids):
        return list(ids)
    return [ids[position] for position in sorted(rng.sample(range(len(ids)), count))]


class TextKeys:
    """A number for the text of a row (white space and case aside), equal for equal texts; computed when asked for."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._known = np.zeros(len(corpus), dtype=bool)
        self._keys = np.zeros(len(corpus), dtype=np.uint64)

    def of(self, row: int) -> int:
        """The key of one row."""
        if not self._known[row]:
            text = " ".join(self._corpus.text(row).casefold().split())
            raw = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
            self._keys[row], self._known[row] = int.from_bytes(raw, "little"), True
        return int(self._keys[row])

    def all(self) -> npt.NDArray[np.uint64]:
        """The keys of all rows, for `mining.mine_negatives`."""
        for row in range(len(self._keys)):
            self.of(row)
        return self._keys
