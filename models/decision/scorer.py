"""A `DecisionScorer` on this machine: slates in, probabilities out, one forward pass a slate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...data_prep.hits import Cost
from ..protocols import Candidate, Slate, SlateScores
from .layout import PackedSlate, SlateLayout
from .model import DecisionModel, SlateBatch


class LowLabelMass(ValueError):
    """The model wants to answer something other than yes or no, so its yes/no odds mean nothing."""


class LocalScorer:
    """Scores slates with a `DecisionModel`.

    max_batch_tokens: tokens of one forward pass over several slates; more is faster on a GPU until memory ends,
        and useless on a CPU once one slate fills the cores.
    """

    def __init__(self, model: DecisionModel, layout: SlateLayout, *, max_batch_tokens: int | None = None) -> None:
        """Check that one candidate at the cap fits a slate."""
        config = layout.config
        if layout.max_candidate_tokens < max(config.max_candidate_tokens, config.max_brief_tokens) + 64:
            raise ValueError(
                f"decision.max_slate_tokens={config.max_slate_tokens} cannot hold one candidate of "
                f"decision.max_candidate_tokens={config.max_candidate_tokens} and a query of "
                f"decision.max_query_tokens={config.max_query_tokens}; raise the first or lower the others"
            )
        self.model, self.layout = model, layout
        self.max_batch_tokens = max_batch_tokens or (32_768 if model.device.type == "cuda" else 2_048)

    @property
    def max_candidates(self) -> int:
        """How many candidates one slate may hold."""
        return self.layout.config.max_candidates

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """How many tokens of candidates one slate may hold."""
        return self.layout.max_candidate_tokens

    def num_tokens(self, candidate: Candidate) -> int:
        """How many tokens of a slate's budget this candidate takes."""
        return self.layout.num_tokens(candidate)

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """P(yes) of each candidate of each slate, normalised over yes and no only (DecisionRAG, equation of p_i^bin).

        Raises:
            LowLabelMass: the mean of P(yes) + P(no) is below `decision.min_label_mass` (yes/no head).
        """
        return self._run([self.layout.render(slate) for slate in slates], self._yes)

    def choose(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """One multiple-choice question a slate: probabilities that sum to 1 over its candidates."""
        return self._run([self.layout.render_choice(slate) for slate in slates], self._choose)

    def _yes(self, batch: SlateBatch) -> list[np.ndarray]:
        if self.model.head is not None:
            log_odds = self.model.yes_logits(batch)
        else:
            _, states_QH = self.model.branch_states(batch)
            self._check_mass(states_QH)
            log_odds = self.model.log_odds(states_QH)
        values = torch.sigmoid(log_odds.double()).cpu().numpy()
        sizes = [len(s.branches) if self.model.head is None else len(s.ends) for s in batch.slates]
        return np.split(values, np.cumsum(sizes)[:-1])

    def _choose(self, batch: SlateBatch) -> list[np.ndarray]:
        logits = self.model.choice_logits(batch)
        sizes = [len(slate.ends) for slate in batch.slates]
        return [part.double().softmax(0).cpu().numpy() for part in logits.split(sizes)]

    def _run(
        self, packed: Sequence[PackedSlate], read: Callable[[SlateBatch], list[np.ndarray]]
    ) -> list[SlateScores]:
        out: dict[int, SlateScores] = {}
        self.model.eval()
        with torch.inference_mode():
            for group in _groups([p.num_tokens for p in packed], self.max_batch_tokens):
                batch = SlateBatch.of([packed[i] for i in group], self.model.device)
                start = time.perf_counter()
                values = read(batch)
                seconds = (time.perf_counter() - start) / batch.num_tokens
                for i, value in zip(group, values, strict=True):
                    tokens = packed[i].num_tokens
                    cost = Cost(
                        requests=1, forwards=1, prompt_tokens=tokens, max_concurrency=1, seconds=seconds * tokens
                    )
                    out[i] = SlateScores(value, packed[i].notes, cost)
        return [out[i] for i in range(len(packed))]

    def _check_mass(self, states_QH: Tensor) -> None:
        floor = self.layout.config.min_label_mass
        mass = float(self.model.label_mass(states_QH).mean())
        if mass < floor or not np.isfinite(mass):
            token = int(self.model.backbone.get_output_embeddings()(states_QH[:1]).argmax())
            wants = self.layout.tokenizer.hf.decode([token])
            raise LowLabelMass(
                f"only {mass:.2g} of the probability falls on yes or no (decision.min_label_mass={floor}); the model "
                f"would rather say {wants!r}. Its chat template or prompt does not fit (an open <think>, a base model "
                "without chat training), or it was trained with another head: use the matching chat model, "
                "train it, or set decision.head=pointer for a trained pointer export"
            )


def _groups(lengths: Sequence[int], max_tokens: int, max_padding: float = 0.15) -> Iterator[list[int]]:
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
