"""Query likelihood: how probable a passage makes the query, by a language model that is trained for nothing else.

log p(query | passage) ranks passages zero-shot (UPR, arXiv 2204.07496), long before the same model's yes or no does:
it is a baseline, and a teacher where there are no labels.

Shapes: N (query, passage) pairs, C candidates of a slate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data_prep.hits import Cost
from ..prompts import LIKELIHOOD_PROMPT
from ..protocols import Candidate, Slate, SlateScores
from .batch import SlateBatch
from .choose import check_options
from .layout import PackedSlate, SlateLayout, cut_query
from .model import DecisionModel
from .scorer import length_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REMEMBERED_TEXTS = 32_768


@dataclass(frozen=True, slots=True)
class SlateLikelihood:
    """log p(query | candidate) of each candidate (C,), and without any; `query_tokens` are what it sums over."""

    sums_C: np.ndarray
    alone: float
    query_tokens: int

    @property
    def gains_C(self) -> np.ndarray:
        """What each candidate adds to the mean log-probability of a query token (C,), natural logarithm.

        It compares across queries: of every query the same share of its own length and rarity is taken off.
        """
        return (self.sums_C - self.alone) / self.query_tokens


class QueryLikelihood:
    """log p(query | passage) by a causal language model under `LIKELIHOOD_PROMPT`; passages and queries are data.

    An adapter on the model is switched off while it reads, so that the base model answers. Texts are cut as `layout`
    cuts them. max_batch_tokens: tokens of one forward pass; None chooses by device.
    """

    def __init__(self, backbone: PreTrainedModel, layout: SlateLayout, *, max_batch_tokens: int | None = None) -> None:
        """Tokenise the fixed words."""
        self.backbone, self.layout = backbone, layout
        embedding: Any = backbone.get_input_embeddings()
        self.device: torch.device = embedding.weight.device
        self.max_batch_tokens = max_batch_tokens or (32_768 if self.device.type == "cuda" else 2_048)
        # Its head is never asked: what is read are whole branches (`label_log_probs`).
        self._model = DecisionModel(backbone, (0, 0))
        self._before, self._after = layout.tokenizer.chat_frame(LIKELIHOOD_PROMPT.system)
        self._passage = layout.tokenizer.data(LIKELIHOOD_PROMPT.passage)
        self._shown = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._tokenize)

    def prompt(self, candidate: Candidate | None) -> list[int]:
        """What stands before the query: the chat up to its answer, with the candidate or with no passage."""
        return [*self._before, *self._passage, *(self._shown(candidate) if candidate else ()), *self._after]

    def query(self, text: str) -> list[int]:
        """The ids of a query, cut to the cap; an empty one is refused where slates are made."""
        return cut_query(self.layout.tokenizer.data(text), self.layout.config)

    def read(self, slates: Sequence[Slate]) -> list[SlateLikelihood]:
        """The likelihoods of each slate, which do not depend on what else is asked.

        A passage that stands before several of these queries is read once for all of them.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        asked: dict[Candidate | None, dict[str, None]] = {}
        for slate in slates:
            for candidate in (None, *slate.candidates):
                asked.setdefault(candidate, {})[slate.query] = None
        with self._reading():
            found = self._log_probs([(candidate, list(queries)) for candidate, queries in asked.items()])
        return [self._of_slate(slate, found) for slate in slates]

    def _of_slate(self, slate: Slate, found: Mapping[tuple[Candidate | None, str], float]) -> SlateLikelihood:
        sums = np.array([found[candidate, slate.query] for candidate in (None, *slate.candidates)])
        if not np.isfinite(sums).all():
            raise FloatingPointError(
                f"the model gives the query {slate.query[:60]!r} a log-probability of "
                f"{sums[~np.isfinite(sums)][0]}: its weights are damaged, or too large for its dtype; try "
                "model.dtype=float32 or bfloat16"
            )
        return SlateLikelihood(sums[1:], float(sums[0]), len(self.query(slate.query)))

    def num_tokens(self, slate: Slate) -> int:
        """Tokens that `read` reads of it alone."""
        prompts = [self.prompt(None), *map(self.prompt, slate.candidates)]
        return sum(map(len, prompts)) + len(prompts) * len(self.query(slate.query))

    def _tokenize(self, candidate: Candidate) -> list[int]:
        """A candidate's page, title and text, cut to its cap, each on a line of its own."""
        config = self.layout.config
        words = "\n".join(filter(None, (candidate.group, candidate.title, candidate.text)))
        cap = config.max_brief_tokens if candidate.brief else config.max_candidate_tokens
        return self.layout.tokenizer.data(f" {words}")[:cap]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """The base model, in evaluation mode, without gradients; afterwards all is as it was."""
        adapted: Any = self.backbone
        was_training = self.backbone.training
        self.backbone.eval()
        try:
            # Not inference_mode: a rotary table that grows in it could not be used by later training steps.
            with torch.no_grad(), adapted.disable_adapter() if hasattr(adapted, "peft_config") else nullcontext():
                yield
        finally:
            self.backbone.train(was_training)

    def _log_probs(
        self, asked: Sequence[tuple[Candidate | None, list[str]]]
    ) -> dict[tuple[Candidate | None, str], float]:
        """Log p of each query after each passage it is asked of; passages of similar length share a pass."""
        packed = [self._pack(candidate, queries) for candidate, queries in asked]
        found: dict[tuple[Candidate | None, str], float] = {}
        for group in length_groups([slate.num_tokens for slate in packed], self.max_batch_tokens):
            batch = SlateBatch.of([packed[n] for n in group]).to(self.device)
            pairs = [(asked[n][0], query) for n in group for query in asked[n][1]]
            found |= zip(pairs, self._model.label_log_probs(batch).double().tolist(), strict=True)
        return found

    def _pack(self, candidate: Candidate | None, queries: Sequence[str]) -> PackedSlate:
        """A passage as the trunk, and each query as a branch, all of which is the label."""
        branches = [self.query(query) for query in queries]
        lengths = [len(branch) for branch in branches]
        return PackedSlate(self.prompt(candidate), [], [], [], [], branches, lengths)


class LikelihoodScorer:
    """A `DecisionScorer` that asks nothing: a candidate is as good as the query is likely after it.

    Candidates are read one by one, so that a slate's other candidates change nothing.
    """

    def __init__(self, likelihood: QueryLikelihood) -> None:
        self.likelihood = likelihood

    @property
    def max_candidates(self) -> int:
        """How many candidates one slate may hold."""
        return self.likelihood.layout.config.max_candidates

    @property
    def max_candidate_tokens_per_slate(self) -> int:
        """How many tokens of candidates one slate may hold."""
        return self.likelihood.layout.max_candidate_tokens_per_slate

    def num_tokens(self, candidate: Candidate) -> int:
        """How many tokens of a slate's budget this candidate takes."""
        return self.likelihood.layout.num_tokens(candidate)

    def yes(self, slates: Sequence[Slate]) -> list[SlateScores]:
        """The logistic function of a candidate's gain a query token (`SlateLikelihood.gains_C`).

        1/2 means that the passage makes the query no likelier than no passage does.
        """
        return [SlateScores(1 / (1 + np.exp(-read.gains_C)), cost=cost) for read, cost in self._read(slates)]

    def choose(self, slates: Sequence[Slate], *, none: bool = False) -> list[SlateScores]:
        """Bayes' rule with equal priors: the softmax of log p(query | candidate); no passage stands for none.

        Raises:
            ValueError: a slate has more than `MAX_OPTIONS` options.
        """
        for slate in slates:
            check_options(len(slate.candidates), none)
        answers = []
        for read, cost in self._read(slates):
            logits = np.append(read.sums_C, read.alone if none else -np.inf)
            share = np.exp(logits - logits.max())
            share /= share.sum()
            answers.append(SlateScores(share[:-1], cost=cost, none=float(share[-1]) if none else None))
        return answers

    def _read(self, slates: Sequence[Slate]) -> Iterator[tuple[SlateLikelihood, Cost]]:
        for slate in slates:
            start = time.perf_counter()
            [read] = self.likelihood.read([slate])
            seconds = time.perf_counter() - start
            tokens = self.likelihood.num_tokens(slate)
            yield read, Cost(requests=1, forwards=1, prompt_tokens=tokens, max_concurrency=1, seconds=seconds)
