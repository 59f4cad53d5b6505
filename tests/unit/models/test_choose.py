"""The final choice: none-of-these, orders of the options, how many there may be; against brute force and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from decision_rows import build, plain_logits
from fakes import COST, FakeScorer, make_slate

from retrail.data_prep.hits import Cost
from retrail.models.decision.batch import SlateBatch
from retrail.models.decision.choose import _shifts, check_options, choose_best
from retrail.models.decision.scorer import LocalScorer
from retrail.models.decision.slates import Pool
from retrail.models.protocols import Candidate, Slate, SlateScores

QUERIES = ["alpha taxes?", "where is the appeal office of beta?", "no"]


def scorer_of(head, kind="tiny:llama", **decision):
    net, layout = build(kind, head=head, **decision)
    if net.head is not None:
        torch.manual_seed(0)
        torch.nn.init.normal_(net.head.relevance.weight, std=0.3)
        net.head.log_scale.data.zero_()
        net.head.relevance.bias.data.zero_()
    return LocalScorer(net, layout)


def option_logits(net, packed):
    """Log-probability of every option's label, one plain forward pass an option."""
    out = []
    for branch, size in zip(packed.branches, packed.label_tokens, strict=True):
        ids = packed.trunk + branch
        logp = plain_logits(net, ids).log_softmax(-1)
        out.append(sum(logp[place - 1, ids[place]] for place in range(len(ids) - size, len(ids))))
    return torch.stack(out)


@pytest.mark.parametrize("order", ["query_first", "candidates_first"])
@torch.no_grad()
def test_none_is_one_more_label(order):
    scorer = scorer_of("yes_no", order=order)
    slates = [make_slate(12), make_slate(1), *(Slate(q, make_slate(3).candidates) for q in QUERIES)]
    for slate, answer in zip(slates, scorer.choose(slates, none=True), strict=True):
        packed = scorer.layout.render_choice(slate, none=True)
        expected = option_logits(scorer.model, packed).double().softmax(0)
        assert len(expected) == len(slate.candidates) + 1
        np.testing.assert_allclose([*answer.values_C, answer.none], expected, atol=1e-5)
        assert answer.values_C.sum() + answer.none == pytest.approx(1, abs=1e-12)
        assert answer.none > 0.001


@torch.no_grad()
def test_none_of_a_pointer_head_is_log_odds_of_nothing():
    scorer = scorer_of("pointer")
    slates = [make_slate(5), make_slate(1)]
    for slate, answer in zip(slates, scorer.choose(slates, none=True), strict=True):
        odds = scorer.model.yes_logits(SlateBatch.of([scorer.layout.render(slate)])).double().exp().numpy()
        np.testing.assert_allclose(answer.values_C, odds / (1 + odds.sum()), atol=1e-6)
        assert answer.none == pytest.approx(1 / (1 + odds.sum()), abs=1e-6)
    # One candidate: the odds that its own yes/no question gives.
    assert scorer.choose(slates[1:], none=True)[0].none == pytest.approx(1 - scorer.yes(slates[1:])[0].values_C[0])


@pytest.mark.parametrize("head", ["yes_no", "pointer"])
def test_without_none_nothing_is_said_of_it(head):
    scorer = scorer_of(head)
    slate = make_slate(4)
    [answer] = scorer.choose([slate])
    assert answer.none is None and answer.values_C.sum() == pytest.approx(1, abs=1e-12)
    if head == "pointer":  # the same logits, so that among the candidates nothing changes
        [asked] = scorer.choose([slate], none=True)
        np.testing.assert_allclose(asked.values_C / asked.values_C.sum(), answer.values_C, atol=1e-6)
        assert scorer.layout.render_choice(slate, none=True) == scorer.layout.render_choice(slate)


@pytest.mark.parametrize("order", ["query_first", "candidates_first"])
def test_question_of_none_reads_as_written(order):
    layout = scorer_of("yes_no", order=order).layout
    slate = make_slate(2)

    def read(packed):
        return [layout.tokenizer.hf.decode(packed.trunk + branch) for branch in packed.branches]

    plain, asked = read(layout.render_choice(slate)), read(layout.render_choice(slate, none=True))
    assert len(asked) == 3 and asked[2].endswith("[0]")
    more = "Write its number in brackets. If none of them answers it, write [0]."
    assert all(more in text for text in asked) and not any("none" in text for text in plain)
    assert [text.replace(" If none of them answers it, write [0].", "") for text in asked[:2]] == plain


@torch.no_grad()
def test_slates_with_and_without_none_share_a_batch():
    scorer = scorer_of("yes_no", order="candidates_first")
    candidates = make_slate(3).candidates
    packed = [
        scorer.layout.pack_choice(QUERIES[:2], candidates),
        scorer.layout.pack_choice(QUERIES, candidates, none=True),
        scorer.layout.pack_choice(QUERIES[:1], make_slate(2).candidates),
    ]
    got = scorer.model.choice_logits(SlateBatch.of(packed))
    raw = [option_logits(scorer.model, slate) for slate in packed]
    against = [part[:3] - part[3] for part in raw[1].split(4)]
    torch.testing.assert_close(got, torch.cat([raw[0], *against, raw[2]]), atol=1e-5, rtol=0)


@torch.no_grad()
def test_labels_are_answers_that_exclude_each_other():
    """Several tokens a label: what the language model gives to all of them cannot be more than 1."""
    net, layout = build()
    packed = layout.render_choice(make_slate(120, words=1), none=True)
    assert {2, 3, 4} == set(packed.label_tokens)
    assert len({tuple(b) for b in packed.branches}) == 121
    for short in packed.branches:
        assert sum(long[: len(short)] == short for long in packed.branches) == 1
    # A model that says nothing but digits and brackets would give all of it to the labels.
    digits = layout.tokenizer.data("0123456789]")
    head = net.backbone.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.full((head.out_features,), -60.0))
    head.bias[digits] = 0.0
    total = option_logits(net, packed).double().exp().sum().item()
    assert 0.01 < total < 1 + 1e-5


@pytest.mark.parametrize("head", ["yes_no", "pointer"])
@pytest.mark.parametrize(("count", "none"), [(255, False), (254, True)])
def test_most_options_sum_to_one(head, count, none):
    [answer] = scorer_of(head, max_candidates=255).choose([make_slate(count, words=1)], none=none)
    assert answer.values_C.shape == (count,)
    assert answer.values_C.sum() + (answer.none or 0) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("count", "none", "most"), [(300, False, "255"), (256, False, "255"), (255, True, "254 and none-of-these")]
)
def test_more_options_are_refused(count, none, most):
    message = f"between {count} candidates, and one request offers at most {most}: choose between the best of them"
    with pytest.raises(ValueError, match=message):
        scorer_of("pointer", max_candidates=400).choose([make_slate(count, words=1)], none=none)
    with pytest.raises(ValueError, match=message):
        choose_best(FakeScorer(None, max_candidates=400), [], [], count, none=none)
    check_options(255, False)
    check_options(254, True)


class Biased:
    """Prefers what stands first: a candidate's logit is its belief less its place."""

    max_candidates, max_candidate_tokens_per_slate = 300, 10_000

    def __init__(self, **belief):
        self.belief, self.calls = belief, []

    def num_tokens(self, candidate):
        return 10

    def choose(self, slates, *, none=False):
        self.calls.append(["".join(c.id for c in slate.candidates) for slate in slates])
        out = []
        for slate in slates:
            odds = np.exp([self.belief[c.id] - place for place, c in enumerate(slate.candidates)])
            total = odds.sum() + none
            notes = ("text of a cut", f"first is {slate.candidates[0].id}")
            out.append(SlateScores(odds / total, notes, COST, 1 / total if none else None))
        return out


def pool_of(ids):
    return Pool("q", tuple(Candidate(i, "", i) for i in ids))


def test_orders_by_hand():
    scorer = Biased(a=0.0, b=0.0, c=0.0)
    [plain] = choose_best(scorer, [pool_of("abc")], [np.array([0.3, 0.2, 0.1])], 3)
    e = [math.exp(-place) for place in range(3)]
    assert plain.step.scores == pytest.approx([x / sum(e) for x in e])
    assert plain.answerable is None
    [two] = choose_best(scorer, [pool_of("abc")], [np.array([0.3, 0.2, 0.1])], 3, orders=2)
    # Shown as abc and as bca: places 0 and 2, 1 and 0, 2 and 1.
    assert scorer.calls == [["abc"], ["abc", "bca"]]
    assert two.step.scores == pytest.approx([(e[i] + e[j]) / 2 / sum(e) for i, j in ((0, 2), (1, 0), (2, 1))])
    assert two.step.kept == ("b",) and two.order[0] == (1, pytest.approx(1 + (e[1] + e[0]) / 2 / sum(e)))
    assert two.step.notes == ("text of a cut", "first is a", "first is b", "mean over 2 orders of the options")
    assert two.step.cost == replace(COST + COST, max_concurrency=2) == Cost(
        requests=2, forwards=2, prompt_tokens=20, max_concurrency=2
    )  # fmt: skip
    [every] = choose_best(scorer, [pool_of("abc")], [np.array([0.3, 0.2, 0.1])], 3, orders=9)
    assert scorer.calls[-1] == ["abc", "bca", "cab"]
    assert every.step.scores == pytest.approx([1 / 3] * 3)


def test_none_by_hand():
    scorer = Biased(a=0.0, b=1.0, c=5.0)
    pools, values = [pool_of("abc"), pool_of("c")], [np.array([0.9, 0.8, 0.1]), np.array([0.5])]
    first, alone = choose_best(scorer, pools, values, 2, orders=2, none=True)
    assert scorer.calls == [["ab", "ba", "c"]]  # one call; a single finalist may be no answer either
    none = [1 / (1 + 1 + 1), 1 / (1 + math.e + math.exp(-1))]
    assert first.answerable == pytest.approx(1 - sum(none) / 2)
    assert sum(first.step.scores) == pytest.approx(first.answerable)
    assert first.step.notes[-1] == f"none of these: {sum(none) / 2:.3f}"
    assert [i for i, _ in first.order] == [1, 0, 2] and first.order[2] == (2, 0.1)
    assert alone.answerable == pytest.approx(math.exp(5) / (1 + math.exp(5)))
    assert alone.order == ((0, pytest.approx(1 + alone.answerable)),)
    [nothing] = choose_best(scorer, pools[:1], values[:1], 0, orders=2, none=True)
    assert nothing.answerable is None and nothing.step is None


def test_orders_are_evenly_spaced():
    assert (
        _shifts(5, 1) == [0]
        and _shifts(5, 2) == [0, 2]
        and _shifts(5, 3) == [0, 1, 3]
        and _shifts(8, 4) == [0, 2, 4, 6]
    )
    assert _shifts(4, 4) == _shifts(4, 100) == [0, 1, 2, 3] and _shifts(0, 3) == []
    assert all(len(set(_shifts(n, k))) == min(n, k) for n in range(1, 40) for k in range(1, 50))
    with pytest.raises(ValueError, match="orders=0 must be 1 or more"):
        choose_best(Biased(), [], [], 5, orders=0)


@pytest.mark.parametrize("head", ["yes_no", "pointer"])
def test_all_orders_forget_where_the_options_begin(head):
    """The mean over all shifts is the same, to 1e-6, whichever of them is the reading order."""
    scorer = scorer_of(head)
    slate = make_slate(5, seed=3)

    def chosen(shift, orders):
        turned = slate.candidates[shift:] + slate.candidates[:shift]
        values = np.full(5, 0.5)
        [final] = choose_best(scorer, [Pool(slate.query, turned)], [values], 5, orders=orders, none=True)
        return {**dict(zip(final.step.ids, final.step.scores, strict=True)), None: final.answerable}

    first, single = chosen(0, 5), chosen(0, 1)
    for shift in range(1, 5):
        assert chosen(shift, 5) == pytest.approx(first, abs=1e-6)
    assert max(abs(chosen(2, 1)[i] - single[i]) for i in single) > 1e-5  # where one order is shown, it matters


def test_an_id_that_appears_twice_is_named():
    twice = (Candidate("a", "", "x"), Candidate("b", "", "y"), Candidate("a", "", "z"))
    for kind in (Slate, Pool):
        with pytest.raises(ValueError, match="candidate id 'a' appears twice among 3 candidates.*an id of its own"):
            kind("q", twice)
        assert kind("q", twice[:2]).candidates == twice[:2]
