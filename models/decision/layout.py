"""From a slate to token ids: one trunk that all questions share, and short branches for what differs.

Shapes: C candidates (or the questions asked about them), T trunk tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from ..config import DecisionConfig
from ..prefix_tree import PrefixTree
from ..prompts import NONE_PROMPT, decision_prompt
from ..protocols import MAX_OPTIONS, Candidate, Slate
from ..tokenizer import SafeTokenizer

_REMEMBERED_TEXTS = 100_000


@dataclass(frozen=True, slots=True)
class PackedSlate:
    """One slate as token ids: candidates, and one or more queries that each ask about all of them.

    trunk: instruction, numbered candidates and, with the query first, the query before and after them; ids (T,).
    starts, ends: positions in the trunk of the first and last token of each candidate that is asked about (C,).
    headings: positions in the trunk of the heading that each of them stands under (C,).
    queries: where the tokens of each query are: in the trunk or, with the candidates first, in its branch (N,).
    branches: id lists; a branch sees the trunk and itself, and its positions start at T. Yes/no head: one a question,
        query after query; pointer head: one a query with the candidates first, otherwise none.
    label_tokens: how many tokens at the end of each branch are the label of an option (0: it is not one).
    notes: which texts were cut, for each query (N,).
    none: whether the last branch of each query is the option that no candidate is right.
    tree: the branches with their common beginnings shared.
    """

    trunk: list[int]
    starts: list[int]
    ends: list[int]
    headings: list[range]
    queries: list[range]
    branches: list[list[int]] = field(default_factory=list)
    label_tokens: list[int] = field(default_factory=list)
    candidates_first: bool = False
    notes: tuple[tuple[str, ...], ...] = ((),)
    none: bool = False
    tree: PrefixTree = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", PrefixTree(self.branches))

    def questions(self) -> Iterator[tuple[int, int]]:
        """(query, candidate asked about), query after query."""
        return product(range(len(self.queries)), range(len(self.ends)))

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass reads."""
        return len(self.trunk) + len(self.tree.ids)


class SlateLayout:
    """Renders slates for one prompt, head and tokenizer; the only place that does, in training and inference.

    Token ids of queries, titles and texts are remembered: the same node is shown to many queries.
    max_slate_tokens: the cap in effect: `decision.max_slate_tokens`, or the model's context where that is shorter. It
        is no part of an export's contract, which holds the setting.

    Raises:
        ValueError: yes and no are not two single tokens, or a slate cannot hold one candidate beside the query.
    """

    def __init__(self, tokenizer: SafeTokenizer, config: DecisionConfig, context: int | None = None) -> None:
        """Tokenise the fixed words and resolve the label ids in context.

        context: positions that the model was made for (`max_position_embeddings`; None: unlimited).
        """
        self.tokenizer, self.config, self.context = tokenizer, config, context
        self.max_slate_tokens = min(config.max_slate_tokens, context or config.max_slate_tokens)
        self.prompt = prompt = decision_prompt(config.instruction)
        self._before, self._after = tokenizer.chat_frame(prompt.system)
        data = tokenizer.data
        self.candidates_first = config.order == "candidates_first"
        header = prompt.candidates.lstrip("\n") if self.candidates_first else prompt.candidates
        self._query, self._candidates, self._newline = data(prompt.query), data(header), data("\n")
        self._again = data("\n" + prompt.query)
        self._group, self._answer = data(prompt.group), data(prompt.answer)
        pointer = config.head == "pointer"
        self._question = [] if pointer else data(prompt.question)
        self._cue = data(prompt.cue) if pointer else []
        self._choice_question, self._choice_answer = data(prompt.choice_question), data(prompt.choice_answer)
        self._tag = lru_cache(maxsize=None)(lambda n: data(prompt.tag.format(n=n + 1)))
        self._choice_label = lru_cache(maxsize=None)(lambda n: data(prompt.choice_label.format(n=n + 1)))
        self._none_question, self._none_label = data(NONE_PROMPT.question), data(NONE_PROMPT.label)
        self._words = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._tokenize)
        self._asked = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._tokenize_query)
        self._longest_body = max(config.max_candidate_tokens, config.max_brief_tokens)
        self.label_ids = self._resolve_labels() if config.head == "yes_no" else None
        numbers = range(max(config.max_candidates, MAX_OPTIONS))
        self._longest_tag = max(len(self._tag(n)) for n in numbers)
        self._longest_label = max(len(self._choice_label(n)) for n in numbers)
        title = 0 if config.branch == "tag" else config.max_candidate_tokens
        if self.max_candidate_tokens_per_slate < self._size(self._longest_body, config.max_candidate_tokens, title):
            short = self.max_slate_tokens < config.max_slate_tokens
            raise ValueError(
                f"decision.max_slate_tokens={config.max_slate_tokens} "
                f"{f'(cut to {context}, the context of the model) ' if short else ''}cannot hold one candidate of "
                f"decision.max_candidate_tokens={config.max_candidate_tokens} (or max_brief_tokens="
                f"{config.max_brief_tokens}) with its heading, and a query of decision.max_query_tokens="
                f"{config.max_query_tokens}; {'' if short else 'raise the first or '}lower the others"
            )

    def render(self, slate: Slate, questions: Sequence[int] | None = None) -> PackedSlate:
        """The packed slate for yes/no questions about `questions` (candidate indices; None asks about all).

        Raises:
            ValueError: the slate has no candidates, or a question is about one that is not there.
        """
        return self.pack([slate.query], slate.candidates, questions)

    def pack(
        self, queries: Sequence[str], candidates: Sequence[Candidate], questions: Sequence[int] | None = None
    ) -> PackedSlate:
        """As `render`, for several queries that ask about the same candidates, each as if it were alone.

        With the query first a slate belongs to one query.

        Raises:
            ValueError: as `render`, several queries share a slate that begins with the query, or the candidates do not
                fit the model's context.
        """
        trunk = self._trunk(queries, candidates)
        asked = range(len(candidates)) if questions is None else questions
        for n in asked:
            if not 0 <= n < len(candidates):
                raise ValueError(f"a question about candidate {n} of a slate of {len(candidates)}")
        if self.config.head == "pointer":  # read at the end of the query, not in an answer
            return self._checked(trunk.packed(asked, trunk.branches, [0] * len(trunk.branches)))
        branches = trunk.ask([*self._question, *self._after], [self._branch(candidates[n], n) for n in asked])
        return self._checked(trunk.packed(asked, branches, [0] * len(branches)))

    def render_choice(self, slate: Slate, *, none: bool = False) -> PackedSlate:
        """The packed slate of one multiple-choice question over all its candidates.

        One branch an option ends with the option's label ("3]" for a yes/no head); the pointer head asks as always. The
        bracket closes every label, so no label is the beginning of another and their probabilities compare. With `none`
        the question of a yes/no head offers one more, which comes last: that no candidate is right.
        """
        return self.pack_choice([slate.query], slate.candidates, none=none)

    def pack_choice(
        self, queries: Sequence[str], candidates: Sequence[Candidate], *, none: bool = False
    ) -> PackedSlate:
        """As `render_choice`, for several queries that ask about the same candidates."""
        if self.config.head == "pointer":
            return self.pack(queries, candidates)
        trunk = self._trunk(queries, candidates)
        labels = [list(self._choice_label(n)) for n in range(len(candidates))]
        question = self._choice_question
        if none:
            labels.append(self._none_label)
            question = [*question, *self._none_question]
        branches = trunk.ask([*question, *self._after, *self._choice_answer], labels)
        lengths = [len(label) for label in labels] * len(queries)
        return self._checked(trunk.packed(range(len(candidates)), branches, lengths, none))

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """Tokens that all candidates of one slate may take: the slate's cap less instruction, query and question."""
        query = self.config.max_query_tokens * (2 if self.prompt.repeat_query else 1)
        frame = len(self._before + self._query + self._candidates + self._again + self._cue + self._after)
        question = len(self._question)
        if self.config.head == "yes_no":
            none = self._none_question + self._none_label
            question = max(question, len(self._choice_question + none + self._choice_answer))
        return self.max_slate_tokens - query - frame - question

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

    def _checked(self, packed: PackedSlate) -> PackedSlate:
        positions = len(packed.trunk) + max(map(len, packed.branches), default=0)
        if self.context is not None and positions > self.context:
            raise ValueError(
                f"a slate of {len(packed.ends)} candidates takes {positions} positions, and the model was made for "
                f"{self.context}: show it fewer candidates at once (`split` does, within "
                "`max_candidate_tokens_per_slate`), or lower decision.max_candidate_tokens"
            )
        return packed

    def _trunk(self, queries: Sequence[str], candidates: Sequence[Candidate]) -> _Trunk:
        if not candidates:
            raise ValueError(f"a slate for the query {queries[0][:60]!r} has no candidates")
        trunk = _Trunk(list(self._before))
        if self.candidates_first:
            trunk.ids += self._candidates
            self._add_candidates(trunk, candidates)
            trunk.branches = [[*self._again, *self._query_words(trunk, query), *self._cue] for query in queries]
            trunk.queries = [range(len(branch)) for branch in trunk.branches]
            return trunk
        if len(queries) != 1:
            raise ValueError(f"{len(queries)} queries share a slate; that takes decision.order=candidates_first")
        words = self._query_words(trunk, queries[0])
        trunk.ids += [*self._query, *words, *self._candidates]
        trunk.queries = [range(len(self._before), len(trunk.ids) - len(self._candidates))]
        self._add_candidates(trunk, candidates)
        if self.prompt.repeat_query:
            start = len(trunk.ids)
            trunk.ids += [*self._again, *words, *self._cue]
            trunk.queries = [range(start, len(trunk.ids))]
        return trunk

    def _query_words(self, trunk: _Trunk, query: str) -> Sequence[int]:
        words, full = self._asked(query)
        where = ", its middle left out" if self.config.query_cut == "middle" else ""
        note = f"query cut from {full} to {len(words)} tokens{where}"
        trunk.query_notes.append([note] if len(words) < full else [])
        return words

    def _add_candidates(self, trunk: _Trunk, candidates: Sequence[Candidate]) -> None:
        group, place = "", range(0)
        for n, candidate in enumerate(candidates):
            if candidate.group != group:
                group, place = candidate.group, range(0)
                if group:
                    place = self._add_heading(trunk, candidate)
            body, full = self._body(candidate)
            if len(body) < full:
                trunk.notes.append(f"text of {candidate.id} cut from {full} to {len(body)} tokens")
            trunk.ids += self._tag(n)
            trunk.headings.append(place)
            trunk.starts.append(len(trunk.ids))
            trunk.ids += [*body, *self._cue]
            trunk.ends.append(len(trunk.ids) - 1)
            trunk.ids += self._newline

    def _add_heading(self, trunk: _Trunk, candidate: Candidate) -> range:
        heading, full = self._cut(candidate.group)
        if len(heading) < full:
            trunk.notes.append(f"heading above {candidate.id} cut from {full} to {len(heading)} tokens")
        start = len(trunk.ids) + len(self._group)
        trunk.ids += [*self._group, *heading, *self._newline]
        return range(start, start + len(heading))

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

    def _tokenize_query(self, query: str) -> tuple[array[int], int]:
        """The ids of a query, cut to the cap, and how many it has."""
        ids = self.tokenizer.data(f" {query}")
        return array("i", cut_query(ids, self.config)), len(ids)

    def _tokenize(self, text: str) -> tuple[array[int], int]:
        """The ids of a text up to the longest cap (4 bytes each, because many are kept), and how many it has."""
        ids = self.tokenizer.data(f" {text}")
        return array("i", ids[: self._longest_body]), len(ids)

    def _resolve_labels(self) -> tuple[int, int]:
        prompt = self.prompt
        yes, no = (self.tokenizer.single(prompt.answer, word) for word in (prompt.yes, prompt.no))
        if yes == no:
            raise ValueError(
                f"this tokenizer gives {prompt.yes!r} and {prompt.no!r} the same id {yes}; set decision.head=pointer"
            )
        return yes, no


def cut_query(ids: Sequence[int], config: DecisionConfig) -> list[int]:
    """The ids of a query without what `decision.query_cut` drops of a longer one than `decision.max_query_tokens`."""
    cap = config.max_query_tokens
    last = cap // 2 if config.query_cut == "middle" and len(ids) > cap else 0
    return [*ids[: cap - last], *ids[len(ids) - last :]]


@dataclass(slots=True)
class _Trunk:
    """A trunk that is being written."""

    ids: list[int]
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    headings: list[range] = field(default_factory=list)
    queries: list[range] = field(default_factory=list)
    branches: list[list[int]] = field(default_factory=list)  # with the candidates first, the words of each query
    query_notes: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ask(self, question: list[int], labels: list[list[int]]) -> list[list[int]]:
        """The branches that end with each of these labels, for each query; the question goes before them.

        It follows the query, so it ends the trunk or, with the candidates first, stands in the branches.
        """
        if not self.branches:
            self.ids += question
            return labels
        return [[*query, *question, *label] for query in self.branches for label in labels]

    def packed(
        self, asked: Sequence[int], branches: list[list[int]], label_tokens: list[int], none: bool = False
    ) -> PackedSlate:
        """The slate with these branches, asking about the candidates `asked`."""
        starts, ends = ([places[n] for n in asked] for places in (self.starts, self.ends))
        headings = [self.headings[n] for n in asked]
        notes = tuple((*of_query, *self.notes) for of_query in self.query_notes)
        first = bool(self.branches)
        return PackedSlate(self.ids, starts, ends, headings, self.queries, branches, label_tokens, first, notes, none)
