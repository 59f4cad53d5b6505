"""Retrieval without a retriever: a decision model walks the corpus tree from its root level to the leaves.

At each level all candidates are judged together, the best stay and are opened, until only leaves are left; the best
leaves then meet in one multiple-choice request (DecisionRAG). Beyond the paper, a search may come back to what it
dropped (`best_first.py`), and another retriever's best may join the last level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...data_prep.corpus import Corpus
from ...data_prep.corpus_build import Ints
from ...data_prep.hits import Cost, Hits, Step
from ..config import NavigateConfig, PriceConfig
from ..protocols import DecisionScorer, Retriever
from .best_first import come_back, has_reached_a_limit, what_is_left
from .budget import Budget, make_budget
from .candidates import Candidates
from .choose import FinalOrder, choose_best
from .compare import CooledScorer, score_pools_anchored
from .fixed_slates import FixedSlates
from .odds import log_odds, log_sigmoid, sigmoid
from .slates import Cut, PoolScores, check_queries, ranked, score_pools, score_slates
from .walk import Floats, Nodes, Walk, joined, opened

Watch = Callable[[str, Step], None]

# In sums along a path, probabilities nearer to 0 and 1 count as this: one certain level must not drown all others.
_LEAST_IN_SUMS = 1e-9


@dataclass(frozen=True, slots=True)
class LevelScores:
    """What a walk judged at one level, before any of it was dropped: `log_odds_C` rank the nodes `rows`."""

    rows: tuple[int, ...]
    log_odds_C: np.ndarray
    cost: Cost


class Navigator:
    """Walks one corpus with one scorer; a `Retriever`.

    Trade-off: the budget of `config` buys recall with candidates of the next level (see `NavigateConfig`).
    """

    def __init__(
        self,
        scorer: DecisionScorer,
        corpus: Corpus,
        config: NavigateConfig | None = None,
        *,
        join: Retriever | None = None,
        budget: Budget | None = None,
        queries_at_once: int = 32,
    ) -> None:
        """Ready to search; nothing is read yet.

        join: a retriever of leaves, whose best `config.join_depth` are judged beside the last level.
        budget: instead of what `config` says.
        queries_at_once: queries whose slates travel together; more fills a GPU better and costs memory.

        Raises:
            ValueError: `config` asks for larger slates than the scorer takes, or starts below the corpus.
        """
        self.scorer, self.corpus = scorer, corpus
        self.config = config or NavigateConfig()
        self.join = join
        self.budget = budget or make_budget(self.config)
        self.queries_at_once = queries_at_once
        if self.config.start_level >= corpus.num_levels:
            raise ValueError(
                f"navigate.start_level={self.config.start_level}: this corpus has the levels 0 to "
                f"{corpus.num_levels - 1}"
            )
        self._cut = Cut.of(scorer, self.config)
        self._shown = Candidates(corpus)
        temperature = self.config.slate_temperature
        self._cooled = scorer if temperature is None else CooledScorer(scorer, temperature)
        self._fixed = FixedSlates(corpus, scorer, self._cut, self._shown)

    def search(self, queries: Sequence[str], *, k: int = 10, watch: Watch | None = None) -> list[Hits]:
        """The best `k` leaves for each query; fewer where the walk reached fewer.

        A candidate's value is its P(yes), or with `path_weight` w sigmoid(logit P(yes) + w * sum of logit P(yes) above
        it). Scores: leaves of the final choice 1 + their probability there, other leaves of the last level their value,
        leaves that were dropped d levels higher their value - d; so the order is that of the stages.
        `watch` is called with (query, step) as soon as a step is done.

        Raises:
            ValueError: a query is empty, or k < 1.
        """
        check_queries(queries, k)
        hits: list[Hits] = []
        for start in range(0, len(queries), self.queries_at_once):
            walks = self._begin(queries[start : start + self.queries_at_once], watch or _ignore)
            hits += self._search(walks, k, watch or _ignore)
        return hits

    def observe(self, queries: Sequence[str], level: int) -> list[LevelScores]:
        """What each walk judges at `level` (0: the root level) with the budget applied above it; goes no deeper.

        Raises:
            ValueError: a query is empty, or the walk begins below `level`.
        """
        check_queries(queries, 1)
        if level < self.config.start_level:
            raise ValueError(f"level {level} is above navigate.start_level={self.config.start_level}")
        seen: list[LevelScores] = []
        for start in range(0, len(queries), self.queries_at_once):
            walks = self._begin(queries[start : start + self.queries_at_once], _ignore)
            for depth in range(self.config.start_level, level):
                self._one_level([w for w in walks if w.nodes is not None], depth, 1, _ignore)
            # A walk that reached its leaves above this level has nothing to judge here.
            open_walks = [w for w in walks if w.nodes is not None]
            scores = dict(zip(map(id, open_walks), self._judge(open_walks), strict=True))
            seen += [self._level_scores(walk, scores.get(id(walk))) for walk in walks]
        return seen

    def _level_scores(self, walk: Walk, scores: PoolScores | None) -> LevelScores:
        if scores is None or walk.nodes is None:
            return LevelScores((), np.empty(0), Cost())
        return LevelScores(tuple(walk.nodes.rows_C.tolist()), self._odds(walk.nodes, scores.values_C), scores.cost)

    def _begin(self, queries: Sequence[str], watch: Watch) -> list[Walk]:
        root = Nodes.all(self.corpus.level_rows(self.config.start_level))
        walks = [Walk(query, root) for query in queries]
        self._join(walks, watch)
        return walks

    def _search(self, walks: list[Walk], k: int, watch: Watch) -> list[Hits]:
        level = self.config.start_level
        while active := [walk for walk in walks if walk.nodes is not None]:
            self._one_level(active, level, k, watch)
            level += 1
        if self.config.search == "best_first":
            come_back(self, walks, watch)
        pools = [self._shown.pool(walk.query, walk.leaves) for walk in walks]
        orders = choose_best(
            self.scorer,
            pools,
            [walk.value_L for walk in walks],
            self.config.choose,
            orders=self.config.choose_orders,
            none=self.config.answerable,
        )
        return [self._hits(walk, final, k, watch) for walk, final in zip(walks, orders, strict=True)]

    def _one_level(self, walks: list[Walk], level: int, k: int, watch: Watch) -> None:
        """Judge what each walk has before it, and open what stays."""
        for walk, scores in zip(walks, self._judge(walks), strict=True):
            assert walk.nodes is not None
            walk.judged.append((walk.nodes.rows_C, log_odds(scores.values_C, _LEAST_IN_SUMS)))
            value_C = self.value(walk.nodes, scores.values_C)
            if self.corpus.are_leaves(walk.nodes.rows_C).all():
                self.note(walk, walk.nodes.rows_C, scores, ranked(value_C)[:k], "leaves", watch)
                walk.found(self.corpus, walk.nodes.rows_C, value_C)
                walk.nodes = None
            else:
                self._descend(walk, scores, level, watch)
        self._join(walks, watch)

    def _judge(self, walks: Sequence[Walk]) -> list[PoolScores]:
        return self.judge([(walk.query, walk.nodes.rows_C) for walk in walks if walk.nodes is not None])

    def judge(self, asked: Sequence[tuple[str, Ints]]) -> list[PoolScores]:
        """P(yes) of the nodes that each query is asked about."""
        if not asked:
            return []
        if self.config.scoring == "fixed":
            slates, places = zip(*(self._fixed.ask(query, rows) for query, rows in asked), strict=True)
            answers = [
                replace(scores, values_C=scores.values_C[place])
                for scores, place in zip(score_slates(self._cooled, slates), places, strict=True)
            ]
        else:
            pools = [self._shown.pool(query, rows) for query, rows in asked]
            answers = (
                score_pools_anchored(self._cooled, pools, self.config.anchors, cut=self._cut)
                if self.config.anchors
                else score_pools(self._cooled, pools, self._cut)
            )
        return [replace(scores, cost=priced(scores.cost, self.config.price)) for scores in answers]

    def value(self, nodes: Nodes, p_C: Floats) -> Floats:
        """What ranks nodes, between 0 and 1: see `search`."""
        if self.config.path_weight == 0:
            return p_C
        return sigmoid(self._odds(nodes, p_C))

    def _odds(self, nodes: Nodes, p_C: Floats) -> Floats:
        """Log-odds of `value`."""
        if self.config.path_weight == 0:
            return log_odds(p_C)
        return log_odds(p_C, _LEAST_IN_SUMS) + self.config.path_weight * nodes.above_C

    def _descend(self, walk: Walk, scores: PoolScores, level: int, watch: Watch) -> None:
        assert walk.nodes is not None
        nodes, value_C = walk.nodes, self.value(walk.nodes, scores.values_C)
        best = self.budget.keep(level, self._odds(nodes, scores.values_C))
        if limit := has_reached_a_limit(self.config, walk, scores.cost):
            best = best[:1]
            scores = replace(scores, notes=(*scores.notes, f"{limit}: the descent goes on with the best node alone"))
        self.note(walk, nodes.rows_C, scores, best, f"level {level + 1}", watch)
        gone = np.setdiff1d(np.arange(len(nodes)), best)
        leaf = self.corpus.are_leaves(nodes.rows_C[gone])
        lost = [(float(value_C[i]), int(nodes.rows_C[i])) for i in gone[leaf]]
        walk.passed_by = [(value - 1.0, row) for value, row in walk.passed_by + lost]
        odds_C, log_p_C = self.own(scores.values_C)
        if self.config.search == "best_first":
            inner = gone[~leaf]
            walk.drop(nodes.at(inner), odds_C[inner], log_p_C[inner])
        # Opened in reading order. A leaf that stays is judged again beside the deeper ones, so that the last level
        # compares all that is left.
        stay = np.sort(best)
        walk.nodes = opened(self.corpus, nodes.at(stay), odds_C[stay], log_p_C[stay])

    def own(self, p_C: Floats) -> tuple[Floats, Floats]:
        """What a node adds to the sums of those below it: its log-odds, and its log P(yes)."""
        odds_C = log_odds(p_C, _LEAST_IN_SUMS)
        return odds_C, log_sigmoid(odds_C)

    def _join(self, walks: list[Walk], watch: Watch) -> None:
        """Let the other retriever's best join the walks that have only leaves before them."""
        if self.join is None or self.config.join_depth == 0:
            return
        last = [w for w in walks if w.nodes is not None and self.corpus.are_leaves(w.nodes.rows_C).all()]
        if not last:
            return
        for walk, hits in zip(last, self.join.search([w.query for w in last], k=self.config.join_depth), strict=True):
            assert walk.nodes is not None
            rows = [self.corpus.row(node) for node in hits.ids]
            above = [walk.judgement_above(self.corpus, row) for row in rows]
            odds, chain = (np.array(part, dtype=float) for part in zip(*above, strict=True)) if rows else ([], [])
            more = Nodes(np.array(rows, dtype=np.int64), np.array(odds), np.array(chain))
            before = len(walk.nodes)
            walk.nodes = joined(self.corpus, walk.nodes, more)
            note = f"{len(walk.nodes) - before} of the other retriever's best {len(rows)} are new"
            ids = tuple(hits.ids)
            step = Step(name="join", ids=ids, scores=hits.scores, kept=ids, notes=(note,), cost=hits.cost)
            self._write(walk, step, watch)

    def note(self, walk: Walk, rows: Ints, scores: PoolScores, best: np.ndarray, name: str, watch: Watch) -> None:
        """Write a step into the walk's trace."""
        notes = scores.notes
        if scores.values_C.max() < 0.5:
            notes = (*notes, f"no candidate is more likely yes than no; the best {len(best)} are kept all the same")
        if self.config.path_weight:
            notes = (*notes, f"ranked by the log-odds along the path (path_weight={self.config.path_weight:g})")
        ids = tuple(candidate.id for candidate in self._shown.of(rows.tolist()))
        step = Step(
            name=name,
            ids=ids,
            scores=tuple(scores.values_C.tolist()),
            kept=tuple(ids[i] for i in best),
            notes=notes,
            cost=scores.cost,
        )
        self._write(walk, step, watch)

    def _write(self, walk: Walk, step: Step, watch: Watch) -> None:
        walk.steps.append(step)
        watch(walk.query, step)

    def _hits(self, walk: Walk, final: FinalOrder, k: int, watch: Watch) -> Hits:
        last = [] if final.step is None else [replace(final.step, cost=priced(final.step.cost, self.config.price))]
        if self.config.search == "best_first":
            last.append(what_is_left(self.config, self.corpus, walk))
        for step in last:
            self._write(walk, step, watch)
        found = [(int(walk.leaves[i]), score) for i, score in final.order]
        found += [(row, value) for value, row in sorted(walk.passed_by, key=lambda pair: -pair[0])]
        scores: dict[int, float] = {}
        for row, score in found:  # a leaf that was passed by and came back counts once, where it stands first
            scores.setdefault(row, score)
        top = list(scores.items())[:k]
        ids = tuple(self.corpus.id(row) for row, _ in top)
        values = tuple(score for _, score in top)
        return Hits(ids, values, walk.cost, tuple(walk.steps), answerable=final.answerable)


def priced(cost: Cost, price: PriceConfig) -> Cost:
    """The cost with its price added."""
    tokens = cost.prompt_tokens * price.prompt + cost.reused_tokens * price.reused
    tokens += cost.generated_tokens * price.generated
    return replace(cost, usd=cost.usd + tokens / 1e6 + cost.requests * price.request)


def _ignore(query: str, step: Step) -> None:
    """Nobody watches."""
