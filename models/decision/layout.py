"""From a slate to token ids: one trunk that all questions share, and one short branch a question.

Shapes: C candidates, T trunk tokens, L branch tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..config import DecisionConfig
from ..prompts import decision_prompt
from ..protocols import Candidate, Slate
from ..tokenizer import SafeTokenizer

_REMEMBERED_TEXTS = 200_000


@dataclass(frozen=True, slots=True)
class PackedSlate:
    """One slate as token ids.

    trunk: instruction, query, numbered candidates, query again, answer header; ids (T,).
    ends: position in the trunk of each candidate's last token (C,).
    branches: one id list a question; a branch sees the trunk and itself, its positions start at T.
    read_from: first position of a branch whose *next-token* distribution is read (yes/no: its last one).
    notes: which texts were cut.
    """

    trunk: list[int]
    ends: list[int]
    branches: list[list[int]] = field(default_factory=list)
    read_from: int = -1
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass reads."""
        return len(self.trunk) + sum(len(branch) for branch in self.branches)


class SlateLayout:
    """Renders slates for one prompt, head and tokenizer; the only place that does, in training and inference.

    Token ids of titles and texts are remembered: the same node is shown to many queries.
    """

    def __init__(self, tokenizer: SafeTokenizer, config: DecisionConfig) -> None:
        """Tokenise the fixed words and resolve the label ids in context."""
        self.tokenizer, self.config = tokenizer, config
        self.prompt = prompt = decision_prompt(config.instruction)
        self._before, self._after = tokenizer.chat_frame(prompt.system)
        data = tokenizer.data
        self._query, self._candidates, self._newline = data(prompt.query), data(prompt.candidates), data("\n")
        self._again = data("\n" + prompt.query)
        self._question, self._choice_question = data(prompt.question), data(prompt.choice_question)
        self._answer, self._choice_answer = data(prompt.answer), data(prompt.choice_answer)
        self._tags: list[list[int]] = []
        self._choice_labels: list[list[int]] = []
        self._words = lru_cache(maxsize=_REMEMBERED_TEXTS)(tokenizer.data)
        self.label_ids = (
            (tokenizer.single(prompt.answer, prompt.yes), tokenizer.single(prompt.answer, prompt.no))
            if config.head == "yes_no"
            else None
        )

    def render(self, slate: Slate, questions: Sequence[int] | None = None) -> PackedSlate:
        """The packed slate for yes/no questions about `questions` (candidate indices; None asks about all).

        A pointer head reads the trunk alone, so its branches are empty.
        """
        trunk, ends, notes = self._trunk(slate)
        if self.config.head == "pointer":
            return PackedSlate(trunk + self._after, ends, notes=notes)
        trunk += self._question + self._after
        asked = range(len(slate.candidates)) if questions is None else questions
        return PackedSlate(trunk, ends, [self._branch(slate, n) for n in asked], -1, notes)

    def render_choice(self, slate: Slate) -> PackedSlate:
        """The packed slate of one multiple-choice question over all its candidates.

        One branch an option holds the option's label ("3]" for a yes/no head); the pointer head has none. The bracket
        closes every label, so no label is the beginning of another and their probabilities compare.
        """
        if self.config.head == "pointer":
            return self.render(slate)
        trunk, ends, notes = self._trunk(slate)
        trunk += self._choice_question + self._after + self._choice_answer
        branches = [self._choice_label(n) for n in range(len(slate.candidates))]
        return PackedSlate(trunk, ends, branches, 0, notes)

    @property
    def max_candidate_tokens(self) -> int:
        """Tokens that all candidates of one slate may take: the slate's cap less instruction and query."""
        query = self.config.max_query_tokens * (2 if self.prompt.repeat_query else 1)
        return self.config.max_slate_tokens - query - len(self._before) - len(self._after) - len(self._question) - 16

    def num_tokens(self, candidate: Candidate) -> int:
        """Tokens that the candidate takes of a slate, in trunk and branch, its own heading included."""
        size = len(self._body(candidate)[0]) + 6
        if candidate.group:
            size += len(self._words(candidate.group)) + 3
        if self.config.head == "yes_no":
            size += 6 + (len(self._words(candidate.title)) if self.config.branch == "tag_title" else 0)
        return size

    def _trunk(self, slate: Slate) -> tuple[list[int], list[int], tuple[str, ...]]:
        if not slate.candidates:
            raise ValueError(f"a slate for the query {slate.query[:60]!r} has no candidates")
        notes: list[str] = []
        query = self.tokenizer.data(slate.query)
        if len(query) > self.config.max_query_tokens:
            notes.append(f"query cut from {len(query)} to {self.config.max_query_tokens} tokens")
            query = query[: self.config.max_query_tokens]
        trunk, ends = self._before + self._query + query + self._candidates, []
        group = ""
        for n, candidate in enumerate(slate.candidates):
            if candidate.group and candidate.group != group:
                heading = self._words(candidate.group)[: self.config.max_candidate_tokens]
                trunk += self._words(self.prompt.group) + heading + self._newline
            group = candidate.group
            body, full = self._body(candidate)
            if len(body) < full:
                notes.append(f"text of {candidate.id} cut from {full} to {len(body)} tokens")
            trunk += self._tag(n) + body + self._newline
            ends.append(len(trunk) - 1)
        if self.prompt.repeat_query:
            trunk += self._again + query
        return trunk, ends, tuple(notes)

    def _body(self, candidate: Candidate) -> tuple[list[int], int]:
        words = self._words(f"{candidate.title}: {candidate.text}" if candidate.title else candidate.text)
        cap = self.config.max_brief_tokens if candidate.brief else self.config.max_candidate_tokens
        return words[:cap], len(words)

    def _branch(self, slate: Slate, n: int) -> list[int]:
        branch = list(self._tag(n))
        if self.config.branch == "tag_title":
            branch += self._words(slate.candidates[n].title)[: self.config.max_candidate_tokens]
        return branch + self._answer

    def _tag(self, n: int) -> list[int]:
        while len(self._tags) <= n:
            self._tags.append(self.tokenizer.data(self.prompt.tag.format(n=len(self._tags) + 1)))
        return self._tags[n]

    def _choice_label(self, n: int) -> list[int]:
        while len(self._choice_labels) <= n:
            self._choice_labels.append(
                self.tokenizer.data(self.prompt.choice_label.format(n=len(self._choice_labels) + 1))
            )
        return self._choice_labels[n]
