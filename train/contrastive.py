"""Contrastive loss terms as pure functions; sums, to be divided by global counts.

Shapes: S states of this rank, A states of all ranks, M documents of all ranks, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Pairs:
    """What belongs together, known before any vector is.

    own_S: the place of each state of this rank among those of all ranks.
    positive_S: the document that each has to find.
    allowed_SM: which documents are negatives of each state: not its positive, nor anything else that is right for its
        query, by id, text or group.
    other_SA: which states are negatives of each, for the query-query term.
    weight_S: what each state counts.
    """

    own_S: Tensor
    positive_S: Tensor
    allowed_SM: Tensor
    other_SA: Tensor
    weight_S: Tensor

    def to(self, device: torch.device | str) -> Pairs:
        """The same on another device."""
        return Pairs(*(getattr(self, f.name).to(device) for f in fields(self)))


def info_nce(
    states_AD: Tensor,
    documents_MD: Tensor,
    pairs: Pairs,
    temperature: float | Tensor,
    *,
    margin: float | None = 0.1,
    states_too: bool = False,
    documents_too: bool = False,
) -> Tensor:
    """-log exp(s(q, d+) / t) / Z of each state, times its weight, summed (Qwen3-Embedding, arXiv 2506.05176).

    Z = exp(s(q, d+) / t) + sum over negatives d of m exp(s(q, d) / t)
        + [states_too] sum over other states q' of m exp(s(q, q') / t)
        + [documents_too] sum over negatives d of m exp(s(d+, d) / t)

    with m = 0 where that similarity is above s(q, d+) + margin: it looks like another right one (None: never).
    Vectors are of unit length; everything is float32.
    """
    query_SD = states_AD[pairs.own_S].float()
    positive_SD = documents_MD[pairs.positive_S].float()
    score_S = (query_SD * positive_SD).sum(1)
    rivals = [(query_SD @ documents_MD.float().T, pairs.allowed_SM)]
    if states_too:
        rivals.append((query_SD @ states_AD.float().T, pairs.other_SA))
    if documents_too:
        rivals.append((positive_SD @ documents_MD.float().T, pairs.allowed_SM))
    logits = [score_S[:, None] / temperature]
    for score_SN, allowed_SN in rivals:
        if margin is not None:
            allowed_SN = allowed_SN & (score_SN.detach() <= score_S.detach()[:, None] + margin)
        logits.append((score_SN / temperature).masked_fill(~allowed_SN, -torch.inf))
    loss_S = torch.cat(logits, dim=1).logsumexp(1) - logits[0][:, 0]
    return (loss_S * pairs.weight_S).sum()


def matryoshka(vectors_ND: Tensor, dimensions: int) -> Tensor:
    """The first `dimensions` of each vector, scaled to length 1 again (arXiv 2205.13147)."""
    return functional.normalize(vectors_ND[:, :dimensions].float(), dim=1)


@dataclass(frozen=True, slots=True)
class Columns:
    """What is known of documents (M,), before any vector is: int64 each.

    document: its number; text: equal for equal texts; row: which row of the step brought it; group: that row's group,
    -1 for none.
    """

    document: Tensor
    text: Tensor
    row: Tensor
    group: Tensor


def allowed_negatives(
    right: Sequence[Sequence[int]], positive_S: Tensor, row_S: Tensor, group_S: Tensor, columns: Columns
) -> Tensor:
    """Which documents are negatives of each state (S, M).

    Not: a document that is right for its query, by number (`right`, of each state), or one with the text of such a one;
    what another row of its group brought, which asks about the same thing. Of copies of one text the first counts.
    """
    S, M = len(right), len(columns.document)
    state = torch.tensor([s for s, rows in enumerate(right) for _ in rows], dtype=torch.long)
    wanted = torch.tensor([row for rows in right for row in rows], dtype=torch.long)
    names, place_M = columns.document.unique(return_inverse=True)
    at = torch.searchsorted(names, wanted).clamp(max=len(names) - 1)
    there = names[at] == wanted
    right_SN = torch.zeros((S, len(names)), dtype=torch.bool)
    right_SN[state[there], at[there]] = True
    right_SM = right_SN[:, place_M]
    right_SM[torch.arange(S), positive_S] = True
    order_M = columns.text.argsort(stable=True)
    _, counts = columns.text[order_M].unique_consecutive(return_counts=True)
    text_M = torch.empty(M, dtype=torch.long)
    text_M[order_M] = torch.arange(len(counts)).repeat_interleave(counts)
    right_text_ST = torch.zeros((S, len(counts)), dtype=torch.long).index_add_(1, text_M, right_SM.long())
    same_group_SM = (columns.group == group_S[:, None]) & (group_S[:, None] >= 0) & (columns.row != row_S[:, None])
    allowed = (right_text_ST[:, text_M] == 0) & ~same_group_SM
    # How many copies that count stand before each, in the order of texts.
    seen_SM = allowed[:, order_M].long().cumsum(1)
    first_M = (counts.cumsum(0) - counts).repeat_interleave(counts)
    before_SM = torch.cat([seen_SM.new_zeros((S, 1)), seen_SM], dim=1)[:, first_M]
    once = torch.empty_like(allowed)
    once[:, order_M] = allowed[:, order_M] & (seen_SM - before_SM == 1)
    return once
