"""Loss terms against hand-computed numbers, torch's own softmax, and numerical gradients."""

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from retrail.train.losses import bce_sum, listwise_sum, log_softmax_by_slate, none_sum

# Slates of 3, 1 and 2 candidates; the last one has no positive.
LOGITS = torch.tensor([math.log(1.0), math.log(2.0), math.log(5.0), 0.7, 0.1, 0.2], dtype=torch.float64)
LABELS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
SLATE = torch.tensor([0, 0, 0, 1, 2, 2])


def test_bce_by_hand():
    # log-odds log(3): P(yes) = 3/4.
    logits = torch.tensor([math.log(3.0), math.log(3.0)])
    assert bce_sum(logits, torch.tensor([1.0, 0.0])).item() == pytest.approx(-math.log(0.75) - math.log(0.25))
    assert bce_sum(LOGITS, LABELS).item() == pytest.approx(
        6 * binary_cross_entropy_with_logits(LOGITS, LABELS).item(), rel=1e-6
    )


def test_listwise_by_hand():
    # Softmax of the first slate: 1/8, 2/8, 5/8, its two positives share the weight; one candidate alone is certain.
    expected = -(math.log(1 / 8) + math.log(5 / 8)) / 2
    assert listwise_sum(LOGITS, LABELS, SLATE, 3).item() == pytest.approx(expected)


def test_one_positive_is_cross_entropy():
    logits = torch.randn(4, 7, dtype=torch.float64)
    gold = torch.tensor([0, 6, 3, 3])
    labels = torch.zeros_like(logits).scatter(1, gold[:, None], 1.0)
    slate = torch.arange(4).repeat_interleave(7)
    ours = listwise_sum(logits.flatten(), labels.flatten(), slate, 4)
    torch.testing.assert_close(ours, cross_entropy(logits, gold, reduction="sum"))


def test_a_slate_without_positives_adds_nothing():
    with_it = listwise_sum(LOGITS, LABELS, SLATE, 3)
    without = listwise_sum(LOGITS[:4], LABELS[:4], SLATE[:4], 2)
    torch.testing.assert_close(with_it, without)
    logits = LOGITS.clone().requires_grad_()
    listwise_sum(logits, LABELS, SLATE, 3).backward()
    assert logits.grad[4:].tolist() == [0.0, 0.0]
    assert logits.grad[0].item() == pytest.approx(1 / 8 - 1 / 2)


def test_none_by_hand():
    # With none (odds 1) the first slate's odds sum to 9; its two positives share the weight.
    first = -(math.log(1 / 9) + math.log(5 / 9)) / 2
    second = math.log(1 + math.exp(-0.7))
    third = math.log(1 + math.exp(0.1) + math.exp(0.2))  # no positive: none is right
    assert none_sum(LOGITS, LABELS, SLATE, 3).item() == pytest.approx(first + second + third)
    logits = LOGITS.clone().requires_grad_()
    none_sum(logits, LABELS, SLATE, 3).backward()
    assert logits.grad[0].item() == pytest.approx(1 / 9 - 1 / 2)
    assert logits.grad[5].item() == pytest.approx(math.exp(0.2 - third))


def test_none_is_one_more_class():
    """A dense twin: torch's cross-entropy over a column more, which is zero."""
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    gold = torch.tensor([0, 6, 7, 3, 7])
    labels = torch.zeros(5, 8, dtype=torch.float64).scatter(1, gold[:, None], 1.0)[:, :7]
    slate = torch.arange(5).repeat_interleave(7)
    mixed = torch.randperm(35, generator=torch.Generator().manual_seed(2))
    ours = none_sum(logits.flatten()[mixed], labels.flatten()[mixed], slate[mixed], 5)
    dense = cross_entropy(torch.cat([logits, torch.zeros(5, 1)], dim=1), gold, reduction="sum")
    torch.testing.assert_close(ours, dense)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_log_softmax_is_torchs_in_each_slate(scale):
    # Candidates of different slates stand between each other.
    slate = torch.tensor([2, 0, 1, 0, 2, 2, 0, 1])
    logits = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scale
    ours = log_softmax_by_slate(logits, slate, 3)
    for s in range(3):
        torch.testing.assert_close(ours[slate == s], torch.log_softmax(logits[slate == s], 0))


def test_gradients_are_right():
    logits = LOGITS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: bce_sum(x, LABELS), logits)
    assert torch.autograd.gradcheck(lambda x: listwise_sum(x, LABELS, SLATE, 3), logits)
    assert torch.autograd.gradcheck(lambda x: none_sum(x, LABELS, SLATE, 3), logits)
    assert torch.autograd.gradcheck(lambda x: log_softmax_by_slate(x, SLATE, 3), logits)
