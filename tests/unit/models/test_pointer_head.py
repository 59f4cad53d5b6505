"""The pointer head on states and slates made by hand."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from retrail.models.decision.batch import SlateBatch
from retrail.models.decision.head import PointerHead
from retrail.models.decision.layout import PackedSlate


def batch_by_hand(*slates):
    """A batch of slates without words: (trunk length, [(start, end) of each candidate], start of the query)."""
    return SlateBatch.of(
        [
            PackedSlate(
                [1] * length,
                [a for a, _ in spans],
                [b for _, b in spans],
                [range(0)] * len(spans),
                [range(query, length)],
            )
            for length, spans, query in slates
        ]
    )


def hand_head(readout):
    """Q swaps the two dimensions, K doubles the first, w = (1/2, 1/4), b = -1, scale 4."""
    head = PointerHead(2, readout)
    with torch.no_grad():
        head.query.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        head.key.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        head.relevance.weight.copy_(torch.tensor([[0.5, 0.25]]))
        head.relevance.bias.fill_(-1.0)
        head.log_scale.fill_(math.log(4))
    return head


def states(batch, rows):
    """These states, and something large wherever there is padding."""
    hidden = torch.full((*batch.trunk_ST.shape, 2), 1e3)
    for s, row in enumerate(rows):
        hidden[s, : len(row)] = torch.tensor(row)
    return hidden


def test_pointer_at_the_end_by_hand():
    batch = batch_by_hand((3, [(0, 1)], 2))
    hidden = states(batch, [[[9.0, 9.0], [2.0, 3.0], [3.0, 0.0]]])
    # Q decide = (0, 3), K end = (4, 3): cosine 9 / (3 * 5) = 0.6; the two numbers of the end normalise to -1 and +1.
    expected = 4.0 * 0.6 + (0.5 * -1 + 0.25 * 1) - 1.0
    assert hand_head("end")(hidden, batch).item() == pytest.approx(expected, abs=1e-4)


def test_late_pointer_by_hand():
    batch = batch_by_hand((6, [(1, 2), (3, 3)], 4))
    # The mean state of the trunk is (1, 1).
    hidden = states(batch, [[[-5.0, -7.0], [5.0, 4.0], [1.0, 2.0], [2.0, 1.0], [1.0, 4.0], [2.0, 2.0]]])
    # Query tokens, centred and swapped: (3, 0), (1, 1). Keys of candidate 1: (8, 3), (0, 1), of candidate 2: (2, 0).
    root = 73**0.5
    first = (max(8 / root, 0) + max((8 + 3) / (2**0.5 * root), 1 / 2**0.5)) / 2
    second = (1 + 1 / 2**0.5) / 2
    level = [(0.5 * -1 + 0.25 * 1) - 1, (0.5 * 1 + 0.25 * -1) - 1]  # ends (1, 2) and (2, 1)
    expected = [4 * first + level[0], 4 * second + level[1]]
    assert hand_head("late")(hidden, batch).tolist() == pytest.approx(expected, abs=1e-3)


@torch.no_grad()
def test_pointer_head_computes_in_float32_under_autocast():
    for readout in ("late", "end"):
        torch.manual_seed(0)
        head = PointerHead(2, readout)
        batch = batch_by_hand((40, [(1, 9), (10, 30)], 31))
        hidden = torch.randn(*batch.trunk_ST.shape, 2)
        expected = head(hidden, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = head(hidden, batch)
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)


def test_pointer_head_survives_a_file(tmp_path):
    head, again = hand_head("late"), PointerHead(2, "late")
    save_file(head.state_dict(), tmp_path / "head.safetensors")
    again.load_state_dict(load_file(tmp_path / "head.safetensors"))
    batch = batch_by_hand((9, [(1, 2), (3, 6)], 7))
    hidden = torch.randn(*batch.trunk_ST.shape, 2)
    assert torch.equal(head(hidden, batch), again(hidden, batch))


def test_unknown_readout_is_refused():
    with pytest.raises(ValueError, match="readout='middle' is not a choice"):
        PointerHead(2, "middle")
