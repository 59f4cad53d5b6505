"""Contrastive terms by hand, against sentence-transformers, and masks against plain loops."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from retrail.train.contrastive import Columns, Pairs, allowed_negatives, info_nce, matryoshka


def unit(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def pairs(states, positive, allowed, other=None, weight=None):
    own = torch.arange(states)
    other = torch.zeros(states, states, dtype=torch.bool) if other is None else other
    return Pairs(own, positive, allowed, other, torch.ones(states) if weight is None else weight)


def test_by_hand():
    # One state with similarities 0.8 to its positive and 0.6, 0 to the others, at temperature 0.2: exponents 4, 3, 0.
    states = torch.tensor([[0.8, 0.6]])
    documents = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8]])
    allowed = torch.tensor([[False, True, True]])
    loss = info_nce(states, documents, pairs(1, torch.tensor([0]), allowed), 0.2)
    assert float(loss) == pytest.approx(math.log(math.exp(4) + math.exp(3) + math.exp(0)) - 4, abs=1e-5)
    weighted = info_nce(states, documents, pairs(1, torch.tensor([0]), allowed, weight=torch.tensor([2.5])), 0.2)
    assert float(weighted) == pytest.approx(2.5 * float(loss), abs=1e-5)
    # A margin of -0.3 takes out what is above 0.5; with documents too, <d+, d> is 0 and -0.6.
    strict = info_nce(states, documents, pairs(1, torch.tensor([0]), allowed), 0.2, margin=-0.3)
    assert float(strict) == pytest.approx(math.log(math.exp(4) + math.exp(0)) - 4, abs=1e-5)
    both = info_nce(states, documents, pairs(1, torch.tensor([0]), allowed), 0.2, documents_too=True)
    assert float(both) == pytest.approx(
        math.log(math.exp(4) + math.exp(3) + math.exp(0) + math.exp(0) + math.exp(-3)) - 4, abs=1e-5
    )


def test_states_too_by_brute_force():
    states, documents = unit(5, 4), unit(7, 4, seed=1)
    positive = torch.tensor([2, 0, 5, 6, 1])
    allowed = torch.ones(5, 7, dtype=torch.bool)
    allowed[torch.arange(5), positive] = False
    other = ~torch.eye(5, dtype=torch.bool)
    other[1, 3] = other[3, 1] = False
    t, margin = 0.1, 0.05
    total = 0.0
    for i in range(5):
        score = float(states[i] @ documents[positive[i]])
        z = math.exp(score / t)
        rivals = [float(states[i] @ documents[j]) for j in range(7) if allowed[i, j]]
        rivals += [float(states[i] @ states[j]) for j in range(5) if other[i, j]]
        rivals += [float(documents[positive[i]] @ documents[j]) for j in range(7) if allowed[i, j]]
        z += sum(math.exp(r / t) for r in rivals if r <= score + margin)
        total += math.log(z) - score / t
    found = info_nce(states, documents, pairs(5, positive, allowed, other), t, margin=margin,
                     states_too=True, documents_too=True)  # fmt: skip
    assert float(found) == pytest.approx(total, rel=1e-5)


def test_equals_sentence_transformers():
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    anchors, positives, negatives = unit(6, 8), unit(6, 8, seed=1), unit(6, 8, seed=2)
    theirs = MultipleNegativesRankingLoss(SimpleNamespace(), scale=20.0)
    expected = theirs.compute_loss_from_embeddings([anchors, positives, negatives], None)
    allowed = torch.ones(6, 12, dtype=torch.bool)
    allowed[torch.arange(6), torch.arange(6)] = False
    ours = info_nce(anchors, torch.cat([positives, negatives]), pairs(6, torch.arange(6), allowed), 1 / 20, margin=None)
    assert float(ours) / 6 == pytest.approx(float(expected), rel=1e-5)


def test_masked_scores_get_no_gradient():
    states = unit(2, 4).requires_grad_()
    documents = unit(3, 4, seed=1).requires_grad_()
    allowed = torch.tensor([[False, True, False], [False, False, False]])
    info_nce(states, documents, pairs(2, torch.tensor([0, 1]), allowed), 0.1, margin=None).backward()
    assert documents.grad[2].abs().max() == 0 and documents.grad[1].abs().max() > 0
    assert states.grad[1].abs().max() == 0  # nothing to be told from
    assert torch.isfinite(states.grad).all()


def test_matryoshka():
    vectors = unit(3, 8)
    cut = matryoshka(vectors, 2)
    assert cut.norm(dim=1) == pytest.approx(torch.ones(3)) and torch.allclose(
        cut[:, 0] / cut[:, 1], vectors[:, 0] / vectors[:, 1]
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_masks_are_those_of_plain_loops(data):
    S, M = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    document = [data.draw(st.integers(0, 6)) for _ in range(M)]
    text = [d if data.draw(st.booleans()) else 100 + d // 2 for d in document]
    row = [data.draw(st.integers(0, 3)) for _ in range(M)]
    group_of = [data.draw(st.integers(-1, 1)) for _ in range(4)]
    right = [data.draw(st.lists(st.integers(0, 9), max_size=3)) for _ in range(S)]
    positive = [data.draw(st.integers(0, M - 1)) for _ in range(S)]
    row_s = [data.draw(st.integers(0, 3)) for _ in range(S)]
    columns = Columns(*(torch.tensor(x) for x in (document, text, row, [group_of[r] for r in row])))
    groups = torch.tensor([group_of[r] for r in row_s])
    found = allowed_negatives(right, torch.tensor(positive), torch.tensor(row_s), groups, columns)
    for s in range(S):
        gold = {text[j] for j in range(M) if document[j] in right[s] or j == positive[s]}
        taken = set()
        for j in range(M):
            same = group_of[row[j]] == group_of[row_s[s]] >= 0 and row[j] != row_s[s]
            wanted = text[j] not in gold and not same and text[j] not in taken
            if wanted:
                taken.add(text[j])
            assert bool(found[s, j]) == wanted
