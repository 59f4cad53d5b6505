"""What a training row of the state encoder is, and what is drawn of it; `state_rows.py` makes and draws them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .hits import Hits
from .negatives import rank_window

MAX_NEGATIVES = 7
Rankings = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Target:
    """One state of a row: what it has observed, and what it must find.

    hop: from 0. role: `root`, `continuation` or `recovery`. observed: rows, oldest first; the last of a recovery state
    is a wrong document. negatives: rows that this state must rank below its positive; may be none.
    """

    hop: int
    role: str
    observed: tuple[int, ...]
    positive: int
    negatives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateRow:
    """One chain as it is trained on in one epoch.

    instruction_key: which root instruction goes with the query. paraphrase: which wording of the instructions.
    chain: gold rows in the order in which they are found. negatives: for each hop, 0 to 7 rows that are wrong for it.
    wrong: for each hop the wrong document of its recovery state, or None where it has none.
    gold: every row that is right for the query, to be no negative of any of its states.
    group: rows of one group ask about the same thing, so that one's documents are no in-batch negatives of another.
    source: which data set, and so which corpus, the row numbers are of.
    """

    query_id: str
    query: str
    instruction_key: str
    paraphrase: int
    chain: tuple[int, ...]
    negatives: tuple[tuple[int, ...], ...]
    wrong: tuple[int | None, ...]
    gold: tuple[int, ...]
    group: str
    source: str

    @property
    def hops(self) -> int:
        """How many documents are to be found."""
        return len(self.chain)

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.source}:{self.query_id}"

    def targets(self) -> Iterator[Target]:
        """Its states, hop by hop: root or continuation, then recovery where the hop has a wrong document."""
        for hop, (positive, negatives, wrong) in enumerate(zip(self.chain, self.negatives, self.wrong, strict=True)):
            before = self.chain[:hop]
            yield Target(hop, "continuation" if hop else "root", before, positive, negatives)
            if wrong is not None:
                yield Target(hop, "recovery", (*before, wrong), positive, negatives)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawConfig:
    """What is drawn of each row in each epoch.

    negatives: how many a hop at most, 0 to 7, fewer where fewer are known; more make a harder loss and longer batches.
    recovery_share: the share of hops that also have a recovery state.
    random_share: of these, the share whose wrong document is any of the corpus, and not one that looks right.
    paraphrases: how many wordings of the instructions there are to draw from.
    seed: of all draws.

    Raises:
        ValueError: a number outside its range.
    """

    negatives: int = MAX_NEGATIVES
    recovery_share: float = 0.3
    random_share: float = 0.15
    paraphrases: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.negatives <= MAX_NEGATIVES:
            raise ValueError(f"negatives={self.negatives} must be between 0 and {MAX_NEGATIVES}")
        for name in ("recovery_share", "random_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.paraphrases < 1 or self.seed < 0:
            raise ValueError(f"paraphrases={self.paraphrases} must be 1 or more, and seed={self.seed} 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongDocuments:
    """Where wrong documents come from, beside the distractors of the data set itself.

    rankings: ids, best first, by query id (for all its hops) or by `state_id` (for that hop alone); gold ones are left
        out, and so are those with a gold document's text.
    picks: the same of the model's own search: its wrong ones are what recovery states have observed.
    ranks: first and last rank of `rankings` to take, counted from 1; the very best often hold unjudged right answers.
    depth: how many of them a row, and a hop, keeps; more is more variety over the epochs, and more memory.
    pick_depth: how many of the model's best wrong picks are kept; a search observes only the best few.
    """

    rankings: Sequence[Rankings] = ()
    picks: Rankings = field(default_factory=dict)
    ranks: tuple[int, int] = (1, 100)
    depth: int = 50
    pick_depth: int = 5

    def __post_init__(self) -> None:
        rank_window((), *self.ranks)
        if self.depth < 0 or self.pick_depth < 0:
            raise ValueError(f"depth={self.depth} and pick_depth={self.pick_depth} must be 0 or more")


def state_id(query_id: str, hop: int) -> str:
    """The id of the state of a query that looks for its document number `hop` (from 0) with those before it observed.

    The file of a search over states, such as `hits.jsonl`, has its rankings under these.
    """
    return f"{query_id}@{hop + 1}"


def ids_of(run: Mapping[str, Hits]) -> Rankings:
    """The ids of a run (`hits.jsonl`, a TREC run) as rankings or picks of `WrongDocuments`."""
    return {name: hits.ids for name, hits in run.items()}
