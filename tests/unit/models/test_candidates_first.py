"""Slates that several queries share: each answer equals that of the query alone, row by row."""

import numpy as np
import pytest
import torch
from decision_rows import build, gradients, plain_logits, row_by_row
from fakes import make_slate

from retrail.data_prep.hits import Cost
from retrail.models.decision.batch import SlateBatch
from retrail.models.decision.scorer import LocalScorer
from retrail.models.protocols import Slate

QUERIES = ["alpha taxes?", "alpha forms?", "where is the appeal office of beta?", "no"]
SHARED = [
    (QUERIES, make_slate(4).candidates),
    (QUERIES[2:], make_slate(1).candidates),
    (["x"], make_slate(6).candidates),
]


def first(head="yes_no", **decision):
    settings = {"order": "candidates_first", "max_candidate_tokens": 24, "max_query_tokens": 32}
    return build(head=head, **{**settings, **decision})


def packs(layout, shared=SHARED):
    return [layout.pack(queries, candidates) for queries, candidates in shared]


def shake_head(net):
    if net.head is not None:
        torch.manual_seed(0)
        torch.nn.init.normal_(net.head.importance.weight)
        torch.nn.init.normal_(net.head.relevance.weight)


def text(layout, ids):
    return layout.tokenizer.hf.decode(ids)


def test_slate_reads_as_written():
    _, layout = first()
    slate = make_slate(2)
    packed = layout.pack(["who?", "why?"], slate.candidates)
    trunk = text(layout, packed.trunk)
    assert "who?" not in trunk and "Candidates:\n" in trunk and "\n\nCandidates" not in trunk
    assert trunk.endswith("\n") and "<|im_end|>\n<|im_start|>assistant" not in trunk
    assert len(packed.branches) == 4
    branch = text(layout, packed.branches[3])
    assert branch.startswith("\nQuery: why?\nFor each candidate:") and "assistant\n" in branch
    assert branch.endswith(text(layout, layout.render(Slate("why?", slate.candidates)).branches[1]))
    # The query and the question are computed once for both of its candidates.
    assert len(packed.tree.ids) < sum(map(len, packed.branches)) * 0.7


@pytest.mark.parametrize("way", ["two_pass", "packed"])
@torch.no_grad()
def test_shared_slates_equal_row_by_row(way):
    net, layout = first()
    net.attention = way
    packed = packs(layout)
    expected = row_by_row(net, packed)
    assert len(expected) == 4 * 4 + 2 * 1 + 6 and expected.std() > 1e-3
    torch.testing.assert_close(net.yes_logits(SlateBatch.of(packed)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["two_pass", "packed"])
@torch.no_grad()
def test_choice_of_shared_slates_equals_brute_force(way):
    """Only the label is scored: the words of the query before it are given."""
    net, layout = first()
    net.attention = way
    packed = [layout.pack_choice(queries, candidates) for queries, candidates in SHARED]
    expected = []
    for slate in packed:
        for branch, size in zip(slate.branches, slate.label_tokens, strict=True):
            ids = slate.trunk + branch
            logp = plain_logits(net, ids).log_softmax(-1)
            expected.append(sum(logp[place - 1, ids[place]] for place in range(len(ids) - size, len(ids))))
    assert {size for slate in packed for size in slate.label_tokens} == {2}
    torch.testing.assert_close(net.choice_logits(SlateBatch.of(packed)), torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["two_pass", "packed", "recomputed"])
def test_gradients_equal_row_by_row(way):
    net, layout = first()
    net.train().requires_grad_(True)
    packed = packs(layout)
    expected = gradients(net, row_by_row(net, packed))
    if way == "recomputed":
        net.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        net.attention = way
    got = gradients(net, net.yes_logits(SlateBatch.of(packed)))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("head", ["yes_no", "pointer"])
@torch.no_grad()
def test_other_queries_change_no_answer(head):
    net, layout = first(head)
    shake_head(net)
    every = net.yes_logits(SlateBatch.of(packs(layout)[:1])).reshape(4, 4)
    for chosen in ([0], [3], [2, 1], [1, 1, 0]):
        some = layout.pack([QUERIES[n] for n in chosen], SHARED[0][1])
        torch.testing.assert_close(
            net.yes_logits(SlateBatch.of([some])).reshape(-1, 4), every[chosen], atol=1e-5, rtol=0
        )
    asked = net.yes_logits(SlateBatch.of([layout.pack(QUERIES, SHARED[0][1], [3, 0])])).reshape(4, 2)
    torch.testing.assert_close(asked, every[:, [3, 0]], atol=1e-5, rtol=0)


def test_a_slate_that_begins_with_the_query_has_one():
    _, layout = build()
    with pytest.raises(ValueError, match="2 queries share a slate.*decision.order=candidates_first"):
        layout.pack(["a", "b"], make_slate(2).candidates)


@torch.no_grad()
def test_one_forward_reads_the_candidates_once(monkeypatch):
    net, layout = first("pointer")
    scorer = LocalScorer(net, layout, max_batch_tokens=100_000)
    sizes = []
    of = SlateBatch.of.__func__
    monkeypatch.setattr(
        SlateBatch,
        "of",
        classmethod(lambda cls, slates, kept=(): (sizes.append(len(slates)), of(cls, slates, kept))[1]),
    )
    slates = [Slate(query, candidates) for queries, candidates in SHARED for query in queries]
    order = [6, 0, 4, 2, 1, 5, 3]
    answers = scorer.yes([slates[i] for i in order])
    assert sum(sizes) == 3
    for i, answer in zip(order, answers, strict=True):
        [alone] = scorer.yes([slates[i]])
        np.testing.assert_allclose(answer.values_C, alone.values_C, atol=1e-5)
    tokens = sum(packed.num_tokens for packed in packs(layout))
    total = sum((answer.cost for answer in answers), Cost())
    assert (total.prompt_tokens, total.requests) == (tokens, 7)
    costs = {i: answer.cost.prompt_tokens for i, answer in zip(order, answers, strict=True)}
    assert max(costs[i] for i in range(4)) - min(costs[i] for i in range(4)) <= 1


@torch.no_grad()
def test_many_queries_are_split_over_passes(monkeypatch):
    net, layout = first("pointer")
    scorer = LocalScorer(net, layout, max_batch_tokens=100)  # three queries of 32 tokens
    seen = []
    pack = layout.pack
    monkeypatch.setattr(
        layout, "pack", lambda queries, candidates: (seen.append(len(queries)), pack(queries, candidates))[1]
    )
    candidates = make_slate(3).candidates
    assert len(scorer.yes([Slate(f"alpha {n}", candidates) for n in range(8)])) == 8
    assert seen == [2, 3, 3]


def test_a_cut_query_is_noted_for_itself_alone():
    _, layout = first("pointer", max_query_tokens=8)
    packed = layout.pack(["a", "a very long query"], make_slate(2, words=1).candidates)
    assert packed.notes == ((), ("query cut from 18 to 8 tokens",))


@pytest.mark.parametrize("head", ["yes_no", "pointer"])
def test_query_positions_hold_the_words_of_that_query(head):
    """A long query after a short one: with a yes/no head every query has several branches."""
    _, layout = first(head, max_query_tokens=300)
    queries = ["a", "b" * 290, "the third"]
    batch = SlateBatch.of([layout.pack(queries, make_slate(3, words=1).candidates)])
    row = torch.cat([batch.trunk_ST, batch.branch_SL], dim=1)[0]
    for query, places in zip(queries, batch.query_pos_SNM[0], strict=True):
        words = text(layout, row[places[places >= 0]].tolist())
        assert words.removesuffix(layout.prompt.cue) == f"\nQuery: {query}"


def test_a_slate_without_questions_is_a_batch():
    for head in ("yes_no", "pointer"):
        _, layout = first(head)
        assert len(SlateBatch.of([layout.pack(["a", "b"], make_slate(2).candidates, [])]).slate_Q) == 0
