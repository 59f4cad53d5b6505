"""Which states a recursive search forms: the searches of RDR and of the methods it is compared with.

Every search but joint feedback is a tree of one shape or another. RDR(H, b) forms the root, lets every state select
b documents among its candidates, and forms a state for each of them, H levels deep; the deepest level selects too (its
selections are proposals, and are not encoded).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import check_choice, make_named

DEDUP = ("level", "none", "sequential")
PATH_SCORES = ("raw", "minmax")


@dataclass(frozen=True, slots=True)
class TreeSearch:
    """RDR(H, b).

    Attributes:
        depth: H, levels of states. Each level multiplies the states by up to `branching`.
        branching: b, how many documents a state selects; 0: all its candidates, and no further level (a dense run).
        root_branching: what the root selects instead (None: as many).
        dedup: `level`: a document that was selected on an earlier level is never selected again, and on one level it
            becomes one state, of the path with the larger score; `none`: paths may repeat a document, and meet;
            `sequential`: states select one after the other, and what one selected no later one can.
        beam: keep only so many of a level's proposals as states, those with the largest path scores; the others stay
            proposals (None: all). Fewer states cost less and see less.
        path_score: v of a proposal, of which the path score is the product: `raw` l_s(d), or `minmax`,
            (l_s(d) - min l_s) / (max l_s - min l_s + 1e-12) over the whole corpus, before any exclusion.
        observe: a child state is the encoding of query and observed `text`, or the `document`'s own vector.

    Raises:
        ValueError: a value out of its range; names it.
    """

    depth: int = 4
    branching: int = 3
    root_branching: int | None = None
    dedup: str = "level"
    beam: int | None = None
    path_score: str = "raw"
    observe: str = "text"

    def __post_init__(self) -> None:
        check_choice("search.dedup", self.dedup, DEDUP)
        check_choice("search.path_score", self.path_score, PATH_SCORES)
        check_choice("search.observe", self.observe, ("text", "document"))
        least(depth=(self.depth, 1), branching=(self.branching, 0))
        least(root_branching=(self.root_branching, 1), beam=(self.beam, 1))
        if self.branching == 0 and self.depth > 1:
            raise ValueError(f"search.branching=0 selects all candidates, but search.depth={self.depth}; set it to 1")

    def branching_at(self, level: int) -> int:
        """How many documents a state of this level (1: the root) selects; 0: all its candidates."""
        return self.root_branching if level == 1 and self.root_branching is not None else self.branching


@dataclass(frozen=True, slots=True)
class AdaptiveSearch(TreeSearch):
    """A tree that grows only where its states are unsure, and stops where nothing new comes.

    Three signals of a state s, each a switch (None: off):

    Attributes:
        widen_margin: a state selects one document instead of `branching` where its best selectable score exceeds the
            second by this much: margin(s) = l_s(d1) - l_s(d2).
        stop_overlap: a state selects nothing where the share of its first ten candidates that are among its parent's
            first ten is at least this: what it observed did not move it.
        stop_entropy: a state selects nothing where H(p_s) / ln |C_s| is at least this: nothing stands out.
        max_states, max_tokens, max_ms: no further level is begun once a query has this many states, has had this many
            tokens computed, or is this long under way; a level that would exceed `max_states` keeps the states with the
            largest path scores. What there is then is returned, with a note.
    """

    widen_margin: float | None = 0.05
    stop_overlap: float | None = None
    stop_entropy: float | None = None
    max_states: int | None = None
    max_tokens: int | None = None
    max_ms: float | None = None

    def __post_init__(self) -> None:
        # A dataclass with slots is a new class, which `super()` without arguments does not find.
        super(AdaptiveSearch, self).__post_init__()
        least(max_states=(self.max_states, 1), max_tokens=(self.max_tokens, 1))
        for name in ("stop_overlap", "stop_entropy"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ValueError(f"search.{name}={value} must be above 0 and at most 1")
        if self.max_ms is not None and self.max_ms <= 0:
            raise ValueError(f"search.max_ms={self.max_ms} must be above 0")


@dataclass(frozen=True, slots=True)
class JointFeedback:
    """As in ANCE-PRF: the root, and one state that observes the root's first `documents` together; nothing is proposed.

    `documents` is m of the text; more bring more evidence and more noise into one vector.
    """

    documents: int = 3

    def __post_init__(self) -> None:
        least(documents=(self.documents, 1))


Search = TreeSearch | JointFeedback


def dense() -> TreeSearch:
    """RDR(1, 0): the root alone; every candidate of it is a proposal."""
    return TreeSearch(depth=1, branching=0)


def chain(depth: int = 4, *, dedup: str = "level", path_score: str = "raw") -> TreeSearch:
    """As in MDR's and GRITHopper's greedy form: each state observes the best new document of the one before."""
    return TreeSearch(depth=depth, branching=1, dedup=dedup, path_score=path_score)


def breadth(documents: int = 8, *, dedup: str = "level", path_score: str = "raw") -> TreeSearch:
    """RDR(2, m): the root, and m states that each observe one of its first m documents."""
    return TreeSearch(depth=2, branching=documents, dedup=dedup, path_score=path_score)


def beam(width: int = 5, depth: int = 4, *, dedup: str = "level", path_score: str = "raw") -> TreeSearch:
    """As in MDR and BeamDR: the `width` best paths of each level go on; at most 1 + (depth - 1) * width states."""
    return TreeSearch(depth, width, root_branching=width, beam=width, dedup=dedup, path_score=path_score)


def doc_as_query(depth: int = 4, branching: int = 3, *, dedup: str = "level", path_score: str = "raw") -> TreeSearch:
    """As in COR: a selected document's own vector is the next query; the encoder reads the root alone."""
    return TreeSearch(depth, branching, dedup=dedup, path_score=path_score, observe="document")


SEARCHES = {
    "dense": dense,
    "root": dense,
    "tree": TreeSearch,
    "chain": chain,
    "breadth": breadth,
    "beam": beam,
    "doc_as_query": doc_as_query,
    "joint_feedback": JointFeedback,
    "adaptive": AdaptiveSearch,
}


def make_search(search: str | Search, options: Mapping[str, Any] | None = None) -> Search:
    """A search by its name, with options, or the search itself.

    Raises:
        ValueError: an unknown name or option; lists those that exist.
    """
    made: Search = make_named("search", SEARCHES, search, options)
    return made


def least(**bounds: tuple[int | None, int]) -> None:
    """Raise ValueError that names the option whose value is below its bound (None: not set)."""
    for name, (value, bound) in bounds.items():
        if value is not None and value < bound:
            raise ValueError(f"search.{name}={value} must be {bound} or more")
