"""Loss terms against hand-computed numbers, torch's own softmax, and numerical gradients."""

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div

from retrail.train.losses import (
    bce_sum,
    distil_sum,
    listwise_sum,
    log_softmax_by_slate,
    none_sum,
    question_weights,
)

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


def test_a_weight_of_two_is_a_candidate_that_stands_there_twice():
    weight = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    again = [0, 1, 1, 2, 3, 3, 3, 4, 5]
    torch.testing.assert_close(bce_sum(LOGITS, LABELS, weight), bce_sum(LOGITS[again], LABELS[again]))
    # By hand: P(yes) = 3/4, right and counted twice.
    logits, two = torch.tensor([math.log(3.0)]), torch.tensor([2.0])
    assert bce_sum(logits, torch.tensor([1.0]), two).item() == pytest.approx(-2 * math.log(0.75))


def test_slates_count_what_they_weigh():
    first = -(math.log(1 / 8) + math.log(5 / 8)) / 2  # see `test_listwise_by_hand`; the others are certain or empty
    weight = torch.tensor([0.5, 7.0, 9.0], dtype=torch.float64)
    assert listwise_sum(LOGITS, LABELS, SLATE, 3, weight).item() == pytest.approx(0.5 * first)
    even = torch.full((3,), 2.0, dtype=torch.float64)
    torch.testing.assert_close(listwise_sum(LOGITS, LABELS, SLATE, 3, even), 2 * listwise_sum(LOGITS, LABELS, SLATE, 3))


def test_question_weights_by_hand():
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    slate, positive = torch.tensor([2.0, 2.0, 0.5, 0.5]), torch.tensor([3.0, 3.0, 1.0, 1.0])
    assert question_weights(labels, slate, positive).tolist() == [6.0, 2.0, 0.5, 0.5]


def test_none_counts_what_a_slate_weighs():
    weight = torch.tensor([0.5, 7.0, 2.0], dtype=torch.float64)
    alone = [none_sum(LOGITS[SLATE == s], LABELS[SLATE == s], torch.zeros(int((SLATE == s).sum()), dtype=torch.long), 1)
             for s in range(3)]  # fmt: skip
    expected = sum(w * value for w, value in zip(weight, alone, strict=True))
    torch.testing.assert_close(none_sum(LOGITS, LABELS, SLATE, 3, weight), expected)


def test_distillation_by_hand():
    # The teacher's log-odds differ by log 3, so 3/4 and 1/4. The student says 1/2, 1/2.
    teacher = torch.tensor([0.2, 0.2 - math.log(3.0), 5.0], dtype=torch.float64)
    logits, slate = torch.tensor([0.3, 0.3, -7.0], dtype=torch.float64), torch.tensor([0, 0, 1])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    weight = torch.tensor([1.0, 4.0], dtype=torch.float64)
    assert distil_sum(logits, teacher, slate, 2, weight).item() == pytest.approx(expected)
    assert distil_sum(logits, teacher, slate, 2, 3 * weight).item() == pytest.approx(3 * expected)


def test_distillation_is_torchs_kl_and_zero_where_student_and_teacher_agree():
    generator = torch.Generator().manual_seed(0)
    teacher, logits = (torch.randn(3, 5, dtype=torch.float64, generator=generator) * 4 for _ in range(2))
    slate, weight = torch.arange(3).repeat_interleave(5), torch.ones(3, dtype=torch.float64)
    ours = distil_sum(logits.flatten(), teacher.flatten(), slate, 3, weight)
    theirs = kl_div(logits.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="sum")
    torch.testing.assert_close(ours, theirs)
    same = distil_sum((teacher + 8).flatten(), teacher.flatten(), slate, 3, weight)
    assert same.item() == pytest.approx(0.0, abs=1e-12)
    leaf = logits.flatten().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distil_sum(x, teacher.flatten(), slate, 3, weight), leaf)
