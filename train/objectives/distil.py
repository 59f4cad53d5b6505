"""A start without labels: the model's own query likelihood, distilled into the decision head.

An untrained model ranks passages far better by log p(query | passage) than by its yes/no answers. So the base model,
its adapter switched off, reads each candidate alone, and the head learns to give the same order in one packed pass. No
judgement is read: slates are drawn around what BM25 finds first for each query.

The teacher's log-odds of yes are (gain - objective.teacher_yes) / objective.teacher_temperature, where a candidate's
gain is what it adds to the mean log-probability of a query token (`SlateLikelihood.gains_C`). One set of log-odds can
fit both terms of the loss: the binary one takes them as they are, the listwise one their differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...data_prep.corpus import Corpus
from ...data_prep.examples import DecisionRow
from ...data_prep.task import Qrels, Query
from ...models.bm25 import BM25
from ...models.decision.layout import SlateLayout
from ...models.decision.likelihood import QueryLikelihood
from ...models.decision.odds import sigmoid
from ..config import DecisionObjectiveConfig
from ..losses import distil_sum
from .decision import DecisionBatch, DecisionObjective, Example

_AT_ONCE = 256


def anchors(corpus: Corpus, queries: Sequence[Query]) -> Qrels:
    """The node that BM25 finds first for each query, in the form of a judgement; {} where it finds none.

    It decides which slates are drawn (it stands on them, with others around it), and is no label.
    """
    bm25 = BM25.from_corpus(corpus)
    found: Qrels = {}
    for start in range(0, len(queries), _AT_ONCE):
        part = queries[start : start + _AT_ONCE]
        hits = bm25.search([query.text for query in part], k=1)
        found |= {query.id: dict.fromkeys(hit.ids, 1) for query, hit in zip(part, hits, strict=True)}
    return found


class DistilObjective(DecisionObjective):
    """KL divergence from the teacher's softmax over each slate, and cross-entropy to its P(yes) of each candidate.

    Terms: `listwise` (and `choice`, for the multiple-choice question of a yes/no head): KL of the head's softmax from
    that of the teacher's log-odds; `bce`: to their logistic function. The teacher reads every slate when it is drawn
    and nothing else at that time, so its answers, like all of a row, follow from (seed, epoch, row), and a resumed run
    is the unbroken one.
    """

    def __init__(
        self,
        rows: Sequence[DecisionRow],
        corpus: Corpus,
        layout: SlateLayout,
        config: DecisionObjectiveConfig,
        teacher: QueryLikelihood,
        *,
        seed: int = 0,
        name: str = "",
    ) -> None:
        """`rows` from `gold_path_rows` of `anchors`; else as `DecisionObjective`."""
        super().__init__(rows, corpus, layout, config, seed=seed, name=name)
        self.teacher = teacher

    def example(self, row: int, epoch: int) -> Example:
        """The slate of a row in an epoch, with the teacher's answers as labels."""
        drawn = super().example(row, epoch)
        read = self.teacher.read(drawn.slates)
        gains_NC = np.stack([likelihood.gains_C for likelihood in read])
        odds_NC = (gains_NC - self.config.teacher_yes) / self.config.teacher_temperature
        return replace(drawn, labels_NC=sigmoid(odds_NC).astype(np.float32), teacher_NC=odds_NC)

    def batch(self, drawn: Sequence[Example]) -> DecisionBatch:
        """The microbatch of these slates."""
        batch = super().batch(drawn)
        odds = [example.teacher_NC.ravel() for example in drawn if example.teacher_NC is not None]
        teacher_Q = torch.from_numpy(np.concatenate(odds)) if odds else torch.zeros(len(batch.labels_Q))
        # Every slate has an order to be learnt, also one where the teacher says yes to nothing.
        asked = float(batch.weight_N.double().sum()) if drawn else 0.0
        counts = {name: asked if name in ("listwise", "choice") else count for name, count in batch.counts.items()}
        return replace(batch, teacher_Q=teacher_Q.float(), counts=counts)

    def listwise(self, logits_Q: Tensor, batch: DecisionBatch) -> Tensor:
        """What the candidates of a slate are compared by: KL divergence from the teacher's softmax."""
        assert batch.teacher_Q is not None
        teacher_Q, query_Q, weight_N = (x.to(logits_Q.device) for x in (batch.teacher_Q, batch.query_Q, batch.weight_N))
        return distil_sum(logits_Q, teacher_Q, query_Q, len(weight_N), weight_N)
