"""From a state to the token ids that are encoded, within a budget.

The whole text of a state is tokenised at once, because tokens reach over the joints of its parts (the Qwen pretokenizer
makes one token of "?" and the newline after it): parts that are tokenised apart give other ids, silently.

What does not fit: the oldest observation is shortened at its end or, where little would be left, dropped; then the
next one. Joint feedback, whose documents were observed together, best first, gives up the last ones instead. Only when
a single observation is left is it shortened too, down to a quarter of the budget, and only then the question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from ..config import check_choice
from ..protocols import State
from .prompts import PromptConfig, RenderedState, render

QUERY_CUTS = ("end", "start")
_REMEMBERED_TEXTS = 20_000
# An older observation of fewer tokens says too little to stay.
_LEAST_OBSERVATION = 16
_TRIES = 8
_REPLACEMENT = "\ufffd"  # what bytes of half a character are decoded to


class TextTokenizer(Protocol):
    """What is needed of a `SafeTokenizer`."""

    hf: Any
    control_ids: frozenset[int]

    def data(self, text: str) -> list[int]:
        """Token ids of text of unknown origin."""
        ...


@dataclass(frozen=True, slots=True)
class FittedState:
    """Token ids of a state without begin and end tokens, and what a reader must know of it."""

    ids: list[int]
    notes: tuple[str, ...]


def first_tokens(tokenizer: TextTokenizer, text: str, count: int) -> str:
    """The beginning of `text` that its first `count` tokens write: tokenised, cut, decoded.

    Where tokens are bytes, a cut may fall inside a character (Chinese, Japanese, Korean, emoji): the bytes of half a
    character, which would decode to U+FFFD, are left out, so that the text ends with the last whole character.
    """
    return _decode(tokenizer, tokenizer.data(text)[:count]).rstrip(_REPLACEMENT) if count > 0 else ""


def last_tokens(tokenizer: TextTokenizer, text: str, count: int) -> str:
    """The end of `text` that its last `count` tokens write; as `first_tokens`."""
    return _decode(tokenizer, tokenizer.data(text)[-count:]).lstrip(_REPLACEMENT) if count > 0 else ""


def _decode(tokenizer: TextTokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class StateFitter:
    """Renders and tokenises states so that each has at most `budget` tokens.

    Text of queries, documents and the instructions that come with queries never becomes a control token; words of
    `prompts` do where they have one.

    Args:
        tokenizer, prompts: of the encoder.
        budget: tokens of a state, begin and end tokens not counted.
        query_cut: where a question that is too long is cut: at its `end`, or its `start` (a dialogue, newest turn
            last).
        setting: name and value of the setting that limits the budget, for messages.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompts: PromptConfig, budget: int, query_cut: str, setting: str
    ) -> None:
        check_choice("encoder.query_cut", query_cut, QUERY_CUTS)
        self.tokenizer, self.prompts, self.budget = tokenizer, prompts, budget
        self._setting = setting
        self._cut_query = first_tokens if query_cut == "end" else last_tokens
        self._control = _control_pattern(tokenizer, prompts)
        self._capped = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._cap)

    def ids(self, state: State) -> list[int]:
        """Token ids of the whole state, however long."""
        return self._tokenise(render(self.prompts, state))

    def fit(self, state: State) -> FittedState:
        """Token ids within the budget.

        Raises:
            ValueError: as `render`, or instruction and layout alone exceed the budget.
        """
        observed, notes = [], []
        for number, text in enumerate(state.observed, 1):
            text, tokens = self._capped(text)
            if tokens:
                limit = self.prompts.observation_max_tokens
                notes.append(f"observation {number} cut from {tokens} tokens (prompts.observation_max_tokens={limit})")
            observed.append(text)
        state = replace(state, observed=tuple(observed))
        ids = self.ids(state)
        if len(ids) > self.budget:
            ids, more = self._shrink(state, ids)
            notes += [f"{note}: the state has more tokens than {self._setting}" for note in more]
        return FittedState(ids, tuple(notes))

    def _cap(self, text: str) -> tuple[str, int]:
        # The text, and how many tokens it had where it was cut.
        if self.prompts.strip:
            text = text.strip()
        limit = self.prompts.observation_max_tokens
        # A token of a tokenizer without unknown tokens writes at least a byte.
        if limit is None or len(text.encode()) <= limit:
            return text, 0
        tokens = len(self.tokenizer.data(text))
        return (first_tokens(self.tokenizer, text, limit), tokens) if tokens > limit else (text, 0)

    def _tokenise(self, rendered: RenderedState) -> list[int]:
        if self._control is None:
            return self.tokenizer.data(rendered.text)
        # As a tokenizer does with its added tokens: they are cut out first, and what lies between is tokenised whole.
        ids: list[int] = []
        run = ""
        for piece in rendered.pieces:
            for n, part in enumerate(self._control.split(piece.text) if piece.ours else [piece.text]):
                if n % 2:
                    ids += self.tokenizer.data(run) if run else []
                    ids.append(int(self.tokenizer.hf.convert_tokens_to_ids(part)))
                    run = ""
                else:
                    run += part
        return ids + (self.tokenizer.data(run) if run else [])

    def _shrink(self, state: State, ids: list[int]) -> tuple[list[int], list[str]]:
        notes: list[str] = []
        left = list(enumerate(state.observed, 1))  # with the numbers that they had
        where = -1 if state.role == "feedback" else 0
        while len(left) > 1:
            number, text = left[where]

            def with_text(shorter: str, left: list[tuple[int, str]] = left) -> list[int]:
                texts = [text for _, text in left]
                texts[where] = shorter
                return self.ids(replace(state, observed=tuple(texts)))

            cut = self._cut(text, first_tokens, with_text, _LEAST_OBSERVATION, ids)
            if cut is not None:
                return cut[1], [*notes, f"observation {number} cut to {cut[0]} tokens"]
            del left[where]
            notes.append(f"observation {number} left out")
            ids = self.ids(replace(state, observed=tuple(text for _, text in left)))
            if len(ids) <= self.budget:
                return ids, notes
        return self._shrink_last(state, left, ids, notes)

    def _shrink_last(
        self, state: State, left: list[tuple[int, str]], ids: list[int], notes: list[str]
    ) -> tuple[list[int], list[str]]:
        """As `_shrink`, where at most one observation is left."""
        state = replace(state, observed=tuple(text for _, text in left))
        if left:
            [(number, text)] = left
            reserve = min(len(self.tokenizer.data(text)), max(1, self.budget // 4))

            def with_text(shorter: str) -> list[int]:
                return self.ids(replace(state, observed=(shorter,)))

            cut = self._cut(text, first_tokens, with_text, reserve, ids)
            if cut is not None:
                return cut[1], [*notes, f"observation {number} cut to {cut[0]} tokens"]
            shorter = first_tokens(self.tokenizer, text, reserve)
            if shorter != text:
                notes = [*notes, f"observation {number} cut to {reserve} tokens"]
            state = replace(state, observed=(shorter,))
            ids = self.ids(state)

        def with_query(shorter: str) -> list[int]:
            return self.ids(replace(state, query=shorter))

        cut = self._cut(state.query, self._cut_query, with_query, 1, ids)
        if cut is not None:
            return cut[1], [*notes, f"the query cut to {cut[0]} tokens"]
        frame = len(with_query(""))
        raise ValueError(
            f"{self._setting} cannot hold a state of the role {state.role!r}, whose instruction, layout and "
            f"{'shortened observation' if left else 'first word of the query'} alone take {frame} tokens and leave no "
            "room for the query; raise it, or shorten the instruction"
        )

    def _cut(
        self,
        text: str,
        shorten: Callable[[TextTokenizer, str, int], str],
        build: Callable[[str], list[int]],
        least: int,
        ids: list[int],
    ) -> tuple[int, list[int]] | None:
        """How many tokens of `text` stay so that `build` fits the budget, and the ids; None: fewer than `least`.

        A few rounds are needed, because tokens at the new end may join what follows. `ids` are those of the whole text.
        """
        keep = len(self.tokenizer.data(text))
        for _ in range(_TRIES):
            keep -= max(1, len(ids) - self.budget)
            if keep < least:
                return None
            ids = build(shorten(self.tokenizer, text, keep))
            if len(ids) <= self.budget:
                return keep, ids
        return None


def _control_pattern(tokenizer: TextTokenizer, prompts: PromptConfig) -> re.Pattern[str] | None:
    """Finds the control tokens that the words of `prompts` have; None: they have none."""
    words = "\n".join(prompts.own_words())
    names: list[str] = tokenizer.hf.convert_ids_to_tokens(sorted(tokenizer.control_ids))
    found = sorted((name for name in names if name in words), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, found)) + ")") if found else None
