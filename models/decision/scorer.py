"""A `DecisionScorer` on this machine: slates in, probabilities out, one forward pass a slate.

With the candidates first, slates of several queries that hold the same candidates share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...data_prep.hits import Cost
from ..protocols import Candidate, Slate, SlateScores
from .batch import SlateBatch
from .choose import check_options
from .layout import PackedSlate, SlateLayout
from .model import DecisionModel, check_keepable
from .trunks import TrunkCache, TrunkMemory, trunk_key

if TYPE_CHECKING:
    from .static import StaticSlates

Pack = Callable[[Sequence[str], Sequence[Candidate]], PackedSlate]
Read = Callable[[SlateBatch], list[np.ndarray]]

# A yes/no branch is rarely longer, and only the grouping of queries rests on it.
_TOKENS_A_QUESTION = 16


class LowLabelMass(ValueError):
    """The model wants to answer something other than yes or no, so its yes/no odds mean nothing."""


@dataclass(frozen=True, slots=True)
class _Trunk:
    """A slate's trunk before its pass: `memory` if it need not be read again, `seconds` if it was read for it now."""

    memory: TrunkMemory | None = None
    seconds: float = 0.0


class LocalScorer:
    """Scores slates with a `DecisionModel`; answers do not depend on which slates are asked together.

    max_batch_tokens: tokens of one forward pass over several slates; more is faster on a GPU until memory ends,
        and useless on a CPU once one slate fills the cores.
    static: slates whose candidates were read beforehand; of these only the queries are read.
    trunk_cache_bytes: memory for candidates that come back in later calls, which are then read no more from the second
        time on (0: none). It takes as much memory as it is given, on the model's device, and makes a query's cost
        depend on those before it.
    """

    def __init__(
        self,
        model: DecisionModel,
        layout: SlateLayout,
        *,
        max_batch_tokens: int | None = None,
        static: StaticSlates | None = None,
        trunk_cache_bytes: int = 0,
    ) -> None:
        """`max_batch_tokens`: None chooses by device.

        Raises:
            ValueError: `static` or `trunk_cache_bytes` with the query first or a model that keeps only a part of what
                it has read, or `static` of another model, prompt or tokenizer.
        """
        self.model, self.layout, self.static = model, layout, static
        self.max_batch_tokens = max_batch_tokens or (32_768 if model.device.type == "cuda" else 2_048)
        if static is not None or trunk_cache_bytes:
            check_keepable(model, layout)
        if static is not None:
            static.check_model(model, layout)
        self._cache = TrunkCache(trunk_cache_bytes)

    @property
    def max_candidates(self) -> int:
        """How many candidates one slate may hold."""
        return self.layout.config.max_candidates

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """How many tokens of candidates one slate may hold."""
        return self.layout.max_candidate_tokens_per_slate

    def num_tokens(self, candidate: Candidate) -> int:
        """How many tokens of a slate's budget this candidate takes."""
        return self.layout.num_tokens(candidate)

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """P(yes) of each candidate of each slate, normalised over yes and no only (DecisionRAG, equation of p_i^bin).

        Raises:
            LowLabelMass: a slate's mean of P(yes) + P(no) is below `decision.min_label_mass` (yes/no head).
            FloatingPointError: the model's logits are not finite.
        """
        return self._run(slates, self.layout.pack, self._yes)

    def choose(self, slates: Sequence[Slate], *, none: bool = False) -> list[SlateScores]:
        """One multiple-choice question a slate: probabilities that sum to 1 over its candidates.

        With `none` one more option, that no candidate is right: with z_c the log-odds of a candidate against it, which
        its own BCE trains (pointer head) or a label of its own gives (yes/no head), it gets 1 / (1 + sum of exp z_c).

        Raises:
            ValueError: a slate has more than `MAX_OPTIONS` options.
            FloatingPointError: the model's logits are not finite.
        """
        for slate in slates:
            check_options(len(slate.candidates), none)
        if not none:
            return self._run(slates, self.layout.pack_choice, self._choose)
        answers = self._run(slates, partial(self.layout.pack_choice, none=True), partial(self._choose, none=True))
        return [replace(a, values_C=a.values_C[:-1], none=float(a.values_C[-1])) for a in answers]

    def _yes(self, batch: SlateBatch) -> list[np.ndarray]:
        if self.model.head is not None:
            log_odds = self.model.yes_logits(batch)
        else:
            states_QH = self.model.read_states(batch)
            log_odds = self.model.log_odds(states_QH)
            self._check_mass(states_QH, batch)
        return [torch.sigmoid(part.double()).cpu().numpy() for part in _by_query(log_odds, batch)]

    def _choose(self, batch: SlateBatch, none: bool = False) -> list[np.ndarray]:
        """Probabilities of each query's options; with `none` that of none-of-these, whose logit is 0, comes last."""
        parts = _by_query(self.model.choice_logits(batch), batch)
        return [functional.pad(part.double(), (0, int(none))).softmax(0).cpu().numpy() for part in parts]

    def _run(self, slates: Sequence[Slate], pack: Pack, read: Read) -> list[SlateScores]:
        shared = self._shared(slates)
        packed = [pack([slates[i].query for i in group], slates[group[0]].candidates) for group in shared]
        out: dict[int, SlateScores] = {}
        was_training = self.model.training
        self.model.eval()
        try:
            # Not inference_mode: a rotary table that grows in it could not be used by later training steps.
            with torch.no_grad():
                trunks = [self._recall(p) for p in packed]
                for together in self._passes(packed, trunks):
                    answers = self._one_pass([packed[n] for n in together], [trunks[n] for n in together], read)
                    out |= zip((i for n in together for i in shared[n]), answers, strict=True)
        finally:
            self.model.train(was_training)
        return [out[i] for i in range(len(slates))]

    def _recall(self, packed: PackedSlate) -> _Trunk:
        """The memory of a slate's trunk, if there is one or the cache wants it."""
        if self.static is None and not self._cache.max_bytes:
            return _Trunk()
        key = trunk_key(packed)
        memory = self._cache.get(key)
        if memory is None and self.static is not None:
            memory = self.static.get(key)
        here = memory is not None and memory.last_H.device == self.model.device
        if here or not self._cache.max_bytes or not self._cache.returns(key):
            return _Trunk(memory)
        seconds = 0.0
        if memory is None:
            start = time.perf_counter()
            [memory] = self.model.read_trunks(SlateBatch.of([packed]).to(self.model.device))
            seconds = time.perf_counter() - start
        memory = memory.to(self.model.device)
        self._cache.put(key, memory)
        return _Trunk(memory, seconds)

    def _passes(self, packed: Sequence[PackedSlate], trunks: Sequence[_Trunk]) -> Iterator[list[int]]:
        """Indices of slates that share a forward pass: with all or none of their trunks known."""
        for known in (False, True):
            some = [n for n, trunk in enumerate(trunks) if (trunk.memory is not None) == known]
            for group in length_groups([packed[n].num_tokens for n in some], self.max_batch_tokens):
                yield [some[n] for n in group]

    def _shared(self, slates: Sequence[Slate]) -> list[list[int]]:
        """Slates that one packed slate answers: those with the same candidates where these come first."""
        if not self.layout.candidates_first:
            return [[i] for i in range(len(slates))]
        same: dict[tuple[Candidate, ...], list[int]] = {}
        for i, slate in enumerate(slates):
            same.setdefault(slate.candidates, []).append(i)
        return [part for group in same.values() for part in _chunks(group, self._queries_at_once(slates[group[0]]))]

    def _queries_at_once(self, slate: Slate) -> int:
        """Queries whose branches fit a forward pass."""
        questions = len(slate.candidates) if self.model.head is None else 0
        longest = self.layout.config.max_query_tokens + questions * _TOKENS_A_QUESTION
        return max(1, self.max_batch_tokens // longest)

    def _one_pass(self, packed: Sequence[PackedSlate], trunks: Sequence[_Trunk], read: Read) -> list[SlateScores]:
        """Answers to the queries of these slates, one after the other."""
        memories = [trunk.memory for trunk in trunks if trunk.memory is not None]
        batch = SlateBatch.of(packed, memories).to(self.model.device)
        start = time.perf_counter()
        values = iter(read(batch))
        seconds = (time.perf_counter() - start) / batch.num_tokens
        out = []
        for slate, trunk in zip(packed, trunks, strict=True):
            for cost, notes in zip(_costs(slate, trunk, seconds), slate.notes, strict=True):
                value_C = next(values)
                if not np.isfinite(value_C).all():
                    raise FloatingPointError(
                        f"the model answers {value_C[~np.isfinite(value_C)][0]} in a slate of {len(slate.ends)} "
                        "candidates: its weights are damaged, or too large for its dtype; try model.dtype=float32 or "
                        "bfloat16"
                    )
                out.append(SlateScores(value_C, notes, cost))
        return out

    def _check_mass(self, states_QH: Tensor, batch: SlateBatch) -> None:
        floor = self.layout.config.min_label_mass
        for states, mass_Q in zip(
            _by_query(states_QH, batch), _by_query(self.model.label_mass(states_QH), batch), strict=True
        ):
            mass = float(mass_Q.mean())
            if mass >= floor or np.isnan(mass):  # not a number is an error of its own, raised with the answers
                continue
            token = int(self.model.backbone.get_output_embeddings()(states[:1]).argmax())
            raise LowLabelMass(
                f"only {mass:.2g} of the probability falls on yes or no (decision.min_label_mass={floor}); the model "
                f"would rather say {self.layout.tokenizer.hf.decode([token])!r}. Its chat template or prompt does not "
                "fit (an open <think>, a base model without chat training), or it was trained with another head: use "
                "the matching chat model, train it, or set decision.head=pointer for a trained pointer export"
            )


def _by_query(values_Q: Tensor, batch: SlateBatch) -> Sequence[Tensor]:
    return torch.split(values_Q, [len(slate.ends) for slate in batch.slates for _ in slate.queries])


def _costs(slate: PackedSlate, trunk: _Trunk, seconds_a_token: float) -> Iterator[Cost]:
    """Each query's share of a slate's cost; tokens whose trunk was not read for it count as reused."""
    count = len(slate.queries)
    reused = len(slate.trunk) if trunk.memory is not None and not trunk.seconds else 0
    for read, known in zip(_shares(slate.num_tokens - reused, count), _shares(reused, count), strict=True):
        seconds = seconds_a_token * (read + known) + trunk.seconds / count
        yield Cost(requests=1, forwards=1, prompt_tokens=read, reused_tokens=known, max_concurrency=1, seconds=seconds)


def _shares(tokens: int, count: int) -> list[int]:
    """`tokens` divided among `count` queries; what does not divide falls on the first ones."""
    part, left = divmod(tokens, count)
    return [part + (n < left) for n in range(count)]


def _chunks(items: list[int], size: int) -> Iterator[list[int]]:
    """Runs of at most `size` items, as few as possible and of similar length."""
    count = -(-len(items) // size)
    for n in range(count):
        yield items[len(items) * n // count : len(items) * (n + 1) // count]


def length_groups(lengths: Sequence[int], max_tokens: int, max_padding: float = 0.15) -> Iterator[list[int]]:
    """Indices of slates that share a forward pass: similar lengths, padded size within `max_tokens`."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    group: list[int] = []
    for i in order:
        if group:
            longest = lengths[group[0]]
            if longest * (len(group) + 1) > max_tokens or lengths[i] < (1 - max_padding) * longest:
                yield group
                group = []
        group.append(i)
    if group:
        yield group
