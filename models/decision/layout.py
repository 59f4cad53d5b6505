"""From a slate to token ids: one trunk that all questions share, and one short branch a question.

Shapes: C candidates (or the questions asked about them), T trunk tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..config import DecisionConfig
from ..prompts import decision_prompt
from ..protocols import Candidate, Slate
from ..tokenizer import SafeTokenizer

_REMEMBERED_TEXTS = 100_000
_MAX_OPTIONS = 255


@dataclass(frozen=True, slots=True)
class PackedSlate:
    """One slate as token ids.

    trunk: instruction, query, numbered candidates, query again, answer header; ids (T,).
    starts, ends: positions in the trunk of the first and last token of each candidate that is asked about (C,).
    query_start: position of the repeated query, which ends with the trunk of a pointer head.
    branches: one id list a question (none for a pointer head); a branch sees the trunk and itself, and its
        positions start at T.
    notes: which texts were cut.
    """

    trunk: list[int]
    starts: list[int]
    ends: list[int]
    query_start: int
    branches: list[list[int]] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass reads."""
        return len(self.trunk) + sum(len(branch) for branch in self.branches)


class SlateLayout:
    """Renders slates for one prompt, head and tokenizer; the only place that does, in training and inference.

    Token ids of queries, titles and texts are remembered: the same node is shown to many queries.

    Raises:
        ValueError: yes and no are not two single tokens, or a slate cannot hold one candidate beside the query.
    """

    def __init__(self, tokenizer: SafeTokenizer, config: DecisionConfig) -> None:
        """Tokenise the fixed words and resolve the label ids in context."""
        self.tokenizer, self.config = tokenizer, config
        self.prompt = prompt = decision_prompt(config.instruction)
        self._before, self._after = tokenizer.chat_frame(prompt.system)
        data = tokenizer.data
        self._query, self._candidates, self._newline = data(prompt.query), data(prompt.candidates), data("\n")
        self._again = data("\n" + prompt.query) if prompt.repeat_query else []
        self._group, self._answer = data(prompt.group), data(prompt.answer)
        pointer = config.head == "pointer"
        self._question = [] if pointer else data(prompt.question)
        self._cue = data(prompt.cue) if pointer else []
        # A pointer is read at the end of the query, not in an answer.
        self._answer_frame = [] if pointer else self._after
        self._choice_question, self._choice_answer = data(prompt.choice_question), data(prompt.choice_answer)
        self._tag = lru_cache(maxsize=None)(lambda n: data(prompt.tag.format(n=n + 1)))
        self._choice_label = lru_cache(maxsize=None)(lambda n: data(prompt.choice_label.format(n=n + 1)))
        self._words = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._tokenize)
        self._longest_body = max(config.max_candidate_tokens, config.max_brief_tokens)
        self.label_ids = self._resolve_labels() if config.head == "yes_no" else None
        numbers = range(max(config.max_candidates, _MAX_OPTIONS))
        self._longest_tag = max(len(self._tag(n)) for n in numbers)
        self._longest_label = max(len(self._choice_label(n)) for n in numbers)
        title = 0 if config.branch == "tag" else config.max_candidate_tokens
        if self.max_candidate_tokens_per_slate < self._size(self._longest_body, config.max_candidate_tokens, title):
            raise ValueError(
                f"decision.max_slate_tokens={config.max_slate_tokens} cannot hold one candidate of "
                f"decision.max_candidate_tokens={config.max_candidate_tokens} (or max_brief_tokens="
                f"{config.max_brief_tokens}) with its heading, and a query of "
                f"decision.max_query_tokens={config.max_query_tokens}; raise the first or lower the others"
            )

    def render(self, slate: Slate, questions: Sequence[int] | None = None) -> PackedSlate:
        """The packed slate for yes/no questions about `questions` (candidate indices; None asks about all).

        A pointer head reads the trunk alone, so its branches are empty.

        Raises:
            ValueError: the slate has no candidates, or a question is about one that is not there.
        """
        trunk, starts, ends, query_start, notes = self._trunk(slate)
        asked = range(len(ends)) if questions is None else questions
        for n in asked:
            if not 0 <= n < len(ends):
                raise ValueError(f"a question about candidate {n} of a slate of {len(ends)}")
        trunk += self._question + self._answer_frame
        branches = [] if self.config.head == "pointer" else [self._branch(slate.candidates[n], n) for n in asked]
        return PackedSlate(trunk, [starts[n] for n in asked], [ends[n] for n in asked], query_start, branches, notes)

    def render_choice(self, slate: Slate) -> PackedSlate:
        """The packed slate of one multiple-choice question over all its candidates.

        One branch an option holds the option's label ("3]" for a yes/no head); the pointer head has none. The bracket
        closes every label, so no label is the beginning of another and their probabilities compare.
        """
        if self.config.head == "pointer":
            return self.render(slate)
        trunk, starts, ends, query_start, notes = self._trunk(slate)
        trunk += self._choice_question + self._after + self._choice_answer
        labels = [list(self._choice_label(n)) for n in range(len(ends))]
        return PackedSlate(trunk, starts, ends, query_start, labels, notes)

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """Tokens that all candidates of one slate may take: the slate's cap less instruction, query and question."""
        query = self.config.max_query_tokens * (2 if self.prompt.repeat_query else 1)
        frame = len(self._before + self._query + self._candidates + self._again + self._cue + self._after)
        question = len(self._question)
        if self.config.head == "yes_no":
            question = max(question, len(self._choice_question + self._choice_answer))
        return self.config.max_slate_tokens - query - frame - question

    def num_tokens(self, candidate: Candidate) -> int:
        """The most tokens that the candidate takes of a slate, in trunk and branch, with a heading of its own.

        So a slate whose candidates sum to at most `max_candidate_tokens_per_slate` never exceeds `max_slate_tokens`.
        """
        heading = len(self._cut(candidate.group)[0]) if candidate.group else None
        return self._size(len(self._body(candidate)[0]), heading, len(self._title(candidate)))

    def _size(self, body: int, heading: int | None, title: int) -> int:
        size = self._longest_tag + body + len(self._cue) + len(self._newline)
        if heading is not None:
            size += len(self._group) + heading + len(self._newline)
        if self.config.head == "yes_no":
            size += max(self._longest_tag + title + len(self._answer), self._longest_label)
        return size

    def _trunk(self, slate: Slate) -> tuple[list[int], list[int], list[int], int, tuple[str, ...]]:
        if not slate.candidates:
            raise ValueError(f"a slate for the query {slate.query[:60]!r} has no candidates")
        notes: list[str] = []
        query, full = self._words(slate.query)
        if full > self.config.max_query_tokens:
            notes.append(f"query cut from {full} to {self.config.max_query_tokens} tokens")
            query = query[: self.config.max_query_tokens]
        trunk = [*self._before, *self._query, *query, *self._candidates]
        starts: list[int] = []
        ends: list[int] = []
        group = ""
        for n, candidate in enumerate(slate.candidates):
            if candidate.group and candidate.group != group:
                heading, full = self._cut(candidate.group)
                if len(heading) < full:
                    notes.append(f"heading above {candidate.id} cut from {full} to {len(heading)} tokens")
                trunk += [*self._group, *heading, *self._newline]
            group = candidate.group
            body, full = self._body(candidate)
            if len(body) < full:
                notes.append(f"text of {candidate.id} cut from {full} to {len(body)} tokens")
            trunk += self._tag(n)
            starts.append(len(trunk))
            trunk += [*body, *self._cue]
            ends.append(len(trunk) - 1)
            trunk += self._newline
        query_start = len(trunk)
        if self.prompt.repeat_query:
            trunk += [*self._again, *query, *self._cue]
        return trunk, starts, ends, query_start, tuple(notes)

    def _branch(self, candidate: Candidate, n: int) -> list[int]:
        return [*self._tag(n), *self._title(candidate), *self._answer]

    def _body(self, candidate: Candidate) -> tuple[Sequence[int], int]:
        words, full = self._words(f"{candidate.title}: {candidate.text}" if candidate.title else candidate.text)
        cap = self.config.max_brief_tokens if candidate.brief else self.config.max_candidate_tokens
        return words[:cap], full

    def _title(self, candidate: Candidate) -> Sequence[int]:
        if self.config.branch == "tag" or not candidate.title:
            return ()
        return self._cut(candidate.title)[0]

    def _cut(self, text: str) -> tuple[Sequence[int], int]:
        words, full = self._words(text)
        return words[: self.config.max_candidate_tokens], full

    def _tokenize(self, text: str) -> tuple[array[int], int]:
        """The ids of a text up to the longest cap (4 bytes each, because many are kept), and how many it has."""
        ids = self.tokenizer.data(text)
        return array("i", ids[: max(self._longest_body, self.config.max_query_tokens)]), len(ids)

    def _resolve_labels(self) -> tuple[int, int]:
        prompt = self.prompt
        yes, no = (self.tokenizer.single(prompt.answer, word) for word in (prompt.yes, prompt.no))
        if yes == no:
            raise ValueError(
                f"this tokenizer gives {prompt.yes!r} and {prompt.no!r} the same id {yes}; set decision.head=pointer"
            )
        return yes, no
