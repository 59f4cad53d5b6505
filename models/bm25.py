"""BM25, the lexical baseline and the first stage of several loops: exact, batched, with stable ties.

The score is the Lucene variant (Kamphuis et al., ECIR 2020, "Which BM25 do you mean?"): for a query Q and a
document d of |d| tokens in a corpus of N documents,

    score(Q, d) = sum over t in Q of  qtf * ln(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + K(d))
    K(d)        = k1 * (1 - b + b * |d| / avgdl)

where a term that stands in the query qtf times counts qtf times. bm25s computes the document side once. Its
retrieval is not used: it returns documents with score 0, breaks ties by descending position and refuses a k
above the corpus size.

Shapes: N documents.
"""

from __future__ import annotations

import functools
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np

from ..data_prep.hits import Cost, Hits

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus

# Scripts written without spaces between words (Han, kana, bopomofo, Hangul, Thai, Lao, Myanmar, Khmer).
_UNSPACED = (
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u1000-\u103f\u1050-\u108f\u1780-\u17d3\u3005-\u3007\u3041-\u3096\u309d-\u309f"
    "\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
# Letters that Unicode does not decompose into a base letter and an accent.
_FOLD = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "æ": "ae", "œ": "oe", "þ": "th", "ı": "i", "ħ": "h", "ё": "е", "’": "'"}
)
_LATIN_ACCENTS = re.compile("(?<=[a-zα-ω])[\u0300-\u036f]+")
# The same tokens as `_word_patterns`, three times as fast for the usual text.
_ASCII_WORD = re.compile("(?<![a-z0-9])[a-z](?:\\+\\+|#)(?![+#])|[a-z0-9]+(?:'(?:s|t|re|ve|ll|d|m)(?![a-z0-9]))?")


@functools.cache
def _word_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """(what a token is, what one written character of an unspaced script is).

    The letters of `re` leave out the combining vowels of Indic scripts, which would cut
    words in pieces.
    """
    marks = [i for i in range(0x300, 0x1F000) if unicodedata.category(chr(i))[0] == "M"]
    starts = [i for i, before in zip(marks, [-1, *marks], strict=False) if i != before + 1]
    ends = [i for i, after in zip(marks, [*marks[1:], -1], strict=True) if after != i + 1]
    mark = "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(starts, ends, strict=True))
    unspaced = f"[{_UNSPACED}][{mark}]*"
    letter = f"(?:(?![{_UNSPACED}])[^\\W_][{mark}]*)"
    contraction = "(?:'(?:s|t|re|ve|ll|d|m)(?![^\\W_]))"
    token = f"(?P<run>(?:{unspaced})+)|(?<![^\\W_])[a-z](?:\\+\\+|#)(?![+#])|{letter}+{contraction}?"
    return re.compile(token), re.compile(unspaced)


def fold(text: str) -> str:
    """`text` in lower case with compatibility forms resolved and accents off Latin and Greek letters.

    Accents of other scripts carry meaning (Cyrillic short i, Indic vowels) and stay.
    """
    if text.isascii():
        return text.lower()
    # Twice: a barred o may carry an accent (before), and a Cyrillic io is one letter only when composed (after).
    text = unicodedata.normalize("NFKD", text).casefold().translate(_FOLD)
    text = _LATIN_ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFC", text).translate(_FOLD)


def split_words(text: str, *, query: bool = False) -> list[str]:
    """The tokens of `text`, in order, before stop words and stemming.

    Words are runs of letters and digits of any script (single letters too), folded; `C++` and `C#` are
    tokens, and English contractions stay whole. Scripts without spaces become character bigrams, as in
    Lucene's CJK analyzer. A document gives its single characters as well, so that a query of one character
    finds it; a query gives a single character only where it stands alone.
    """
    text = fold(text)
    if text.isascii():
        return _ASCII_WORD.findall(text)
    token, unspaced = _word_patterns()
    words: list[str] = []
    for match in token.finditer(text):
        if match["run"] is None:
            words.append(match[0])
            continue
        characters = unspaced.findall(match[0])
        if not query or len(characters) == 1:
            words.extend(characters)
        words.extend(a + b for a, b in pairwise(characters))
    return words


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions of the `k` largest of a one-dimensional array, best first, equal scores by lower position."""
    size = len(scores)
    if k < size:
        kth = np.partition(scores, size - k)[size - k]
        above = np.flatnonzero(scores > kth)
        level = np.flatnonzero(scores == kth)[: k - len(above)]
        chosen = np.sort(np.concatenate([above, level]))
    else:
        chosen = np.arange(size)
    return chosen[np.argsort(-scores[chosen], kind="stable")]


class BM25:
    """A BM25 index in memory over (id, text) pairs; a `Retriever`.

    Only documents that share a term with the query are returned, so there may be fewer than k, or none (empty
    query, no known term). An empty corpus and empty texts are legal: nothing is found in them, though an empty
    text counts in N and in the mean length. Equal scores keep the order of the corpus.

    Args:
        ids, texts: the documents; `texts` may be any iterable of the same length.
        k1: how slowly repeated terms saturate (0: presence only). b: how much long texts are held back (0..1).
        language: Snowball stemmer, None for no stemming. Accents are folded before stemming.
        stop_words: words to leave out of documents and queries (compared folded, before stemming).

    Raises:
        ValueError: lengths differ, an id repeats, a setting is out of range or the language is unknown.
        ImportError: bm25s, or PyStemmer for a `language`, is not installed.
    """

    def __init__(
        self,
        ids: Sequence[str],
        texts: Iterable[str],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        language: str | None = "english",
        stop_words: Collection[str] = (),
    ) -> None:
        if not k1 >= 0:
            raise ValueError(f"bm25.k1={k1} must be 0 or more")
        if not 0 <= b <= 1:
            raise ValueError(f"bm25.b={b} must be between 0 and 1")
        if isinstance(stop_words, str):
            raise ValueError(f"bm25.stop_words={stop_words!r} must be a collection of words, not one string")
        self.ids = tuple(ids)
        self.k1, self.b, self.language = k1, b, language
        self._stem = _Stemmer(language)
        self._stop_words = frozenset(fold(word) for word in stop_words)
        self._terms: dict[str, int] = {}
        self._starts, self._rows, self._values = np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
        check_unique(self.ids)
        self._index(texts)

    @classmethod
    def from_corpus(cls, corpus: Corpus, rows: Sequence[int] | None = None, **options: object) -> Self:
        """An index over the leaves of `corpus` in reading order, or over `rows`; a text is title, space, text."""
        chosen = corpus.leaves().tolist() if rows is None else list(rows)
        texts = (f"{corpus.title(row)} {corpus.text(row)}" for row in chosen)
        return cls([corpus.id(row) for row in chosen], texts, **options)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def description(self) -> str:
        """What tells this index from another, for logs and for resuming an evaluation."""
        return (
            f"BM25(k1={self.k1}, b={self.b}, language={self.language}, stop_words={len(self._stop_words)}, "
            f"documents={len(self.ids)}, terms={len(self._terms)}, postings={len(self._rows)})"
        )

    def search(self, queries: Sequence[str], *, k: int = 10) -> list[Hits]:
        """One ranking a query, at most `k` ids, scores above 0; `cost.seconds` is filled."""
        if isinstance(queries, str):
            raise TypeError("search() takes a sequence of queries; put a single query in a list")
        if k < 1:
            raise ValueError(f"k={k} must be 1 or more")
        results = []
        for query in queries:
            started = time.perf_counter()
            scores_N = self.scores(query)
            found = np.flatnonzero(scores_N)
            best = found[top_k(scores_N[found], k)]
            ids = tuple(self.ids[row] for row in best.tolist())
            scores = tuple(scores_N[best].tolist())
            results.append(Hits(ids, scores, Cost(seconds=time.perf_counter() - started)))
        return results

    def scores(self, query: str) -> np.ndarray:
        """The score of every document, float64, shape (N,), in the order of the ids."""
        counts = Counter(self._terms[word] for word in self._tokens(query, query=True) if word in self._terms)
        spans = [(self._starts[term], self._starts[term + 1], qtf) for term, qtf in counts.items()]
        if not spans:
            return np.zeros(len(self.ids))
        # Sums of float32 values are exact in float64: the order of the words changes no score and breaks no tie.
        rows = np.concatenate([self._rows[start:stop] for start, stop, _ in spans])
        values = np.concatenate([self._values[start:stop].astype(np.float64) * qtf for start, stop, qtf in spans])
        return np.bincount(rows, weights=values, minlength=len(self.ids))

    def _tokens(self, text: str, *, query: bool = False) -> list[str]:
        words = split_words(text, query=query)
        if self._stop_words:
            words = [word for word in words if word not in self._stop_words]
        return self._stem(words)

    def _index(self, texts: Iterable[str]) -> None:
        """Number the terms and compute the postings: the documents of term t are `_rows[_starts[t]:_starts[t + 1]]`."""
        documents: list[list[int]] = []
        for text in texts:
            documents.append([self._terms.setdefault(word, len(self._terms)) for word in self._tokens(text)])
        if len(documents) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids but {len(documents)} texts")
        if not self._terms:  # bm25s would divide by a mean length of 0
            self._starts, self._rows, self._values = (
                np.zeros(1, np.int64),
                np.zeros(0, np.int32),
                np.zeros(0, np.float32),
            )
            return
        index = _bm25s().BM25(k1=self.k1, b=self.b, method="lucene", csc_backend="numpy", backend="numpy")
        index.index((documents, dict(self._terms)), create_empty_token=False, show_progress=False)
        self._starts, self._rows, self._values = (index.scores[name] for name in ("indptr", "indices", "data"))


def check_unique(ids: Sequence[str]) -> None:
    """Raise ValueError that names the first id that repeats an earlier one."""
    if len(set(ids)) == len(ids):
        return
    seen: set[str] = set()
    for position, doc_id in enumerate(ids):
        if doc_id in seen:
            raise ValueError(f"id {doc_id!r} at position {position} repeats an earlier one; ids must be unique")
        seen.add(doc_id)


class _Stemmer:
    """Snowball stems of words, each word stemmed once; the identity without a language."""

    def __init__(self, language: str | None) -> None:
        self._known: dict[str, str] = {}
        self._stem_word = None
        if language is None:
            return
        try:
            import Stemmer
        except ImportError as error:
            raise ImportError("BM25 stems words with PyStemmer: pip install PyStemmer, or language=None") from error
        if language not in Stemmer.algorithms():
            raise ValueError(
                f"bm25.language={language!r} has no stemmer; use None or one of: {', '.join(Stemmer.algorithms())}"
            )
        self._stem_word = Stemmer.Stemmer(language, 0).stemWord  # 0: no second cache below ours

    def __call__(self, words: list[str]) -> list[str]:
        if self._stem_word is None:
            return words
        known = self._known
        for word in words:
            if word not in known:
                known[word] = self._stem_word(word)
        return [known[word] for word in words]


def _bm25s() -> ModuleType:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError("BM25 needs bm25s: pip install bm25s") from error
    module: ModuleType = bm25s
    return module
