"""Loss terms as pure functions; every one returns a sum, to be divided by a global count.

Shapes: Q candidates of all slates of a batch, S slates; slate_Q names the slate of each candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def bce_sum(logits_Q: Tensor, labels_Q: Tensor, weight_Q: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of the log-odds of yes, summed over candidates.

    Count: the sum of the weights, so that a weight of 2 is a candidate that stands there twice (None: all 1).
    """
    return functional.binary_cross_entropy_with_logits(logits_Q, labels_Q, weight_Q, reduction="sum")


def listwise_sum(
    logits_Q: Tensor, labels_Q: Tensor, slate_Q: Tensor, num_slates: int, weight_S: Tensor | None = None
) -> Tensor:
    """Softmax cross-entropy inside each slate, summed over the slates that have a positive.

    -sum_c y_c log softmax(logits)_c / sum_c y_c (ListNet's top-one form), times the slate's weight (None: all 1).
    Count: the sum of the weights of slates with a positive.
    """
    positives_S = labels_Q.new_zeros(num_slates).index_add(0, slate_Q, labels_Q)
    share_S = 1.0 / positives_S.clamp(min=1.0)
    if weight_S is not None:
        share_S = share_S * weight_S
    return -(labels_Q * share_S[slate_Q] * log_softmax_by_slate(logits_Q, slate_Q, num_slates)).sum()


def question_weights(labels_Q: Tensor, weight_Q: Tensor, positive_Q: Tensor) -> Tensor:
    """What each question counts (Q,): the weight of its slate, times that of a positive where the answer is yes."""
    return weight_Q * torch.where(labels_Q > 0, positive_Q, 1.0)


def none_sum(
    logits_Q: Tensor, labels_Q: Tensor, slate_Q: Tensor, num_slates: int, weight_S: Tensor | None = None
) -> Tensor:
    """Softmax cross-entropy inside each slate over its candidates and none-of-these, whose logit is 0; summed.

    As `listwise_sum`, with none-of-these as the positive of a slate that has no other. Count: the sum of the weights.
    """
    each_S = torch.arange(num_slates, device=slate_Q.device)
    positives_S = labels_Q.new_zeros(num_slates).index_add(0, slate_Q, labels_Q)
    return listwise_sum(
        torch.cat([logits_Q, logits_Q.new_zeros(num_slates)]),
        torch.cat([labels_Q, (positives_S == 0).to(labels_Q.dtype)]),
        torch.cat([slate_Q, each_S]),
        num_slates,
        weight_S,
    )


def distil_sum(logits_Q: Tensor, teacher_Q: Tensor, slate_Q: Tensor, num_slates: int, weight_S: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(logits)) inside each slate, times the slate's weight, summed.

    teacher_Q: log-odds, up to a constant a slate. Count: the sum of the weights.
    """
    target_Q = log_softmax_by_slate(teacher_Q, slate_Q, num_slates)
    gap_Q = target_Q - log_softmax_by_slate(logits_Q, slate_Q, num_slates)
    return (weight_S[slate_Q] * target_Q.exp() * gap_Q).sum()


def log_softmax_by_slate(logits_Q: Tensor, slate_Q: Tensor, num_slates: int) -> Tensor:
    """Logarithm of the softmax over the candidates of each slate (Q,), all slates at once."""
    top_S = torch.full((num_slates,), -torch.inf, device=logits_Q.device, dtype=logits_Q.dtype)
    top_S = top_S.scatter_reduce(0, slate_Q, logits_Q.detach(), "amax")
    shifted_Q = logits_Q - top_S[slate_Q]
    total_S = torch.zeros_like(top_S).index_add(0, slate_Q, shifted_Q.exp())
    return shifted_Q - total_S.log()[slate_Q]
