"""The packed network against plain forward passes, one question a time."""

import copy
from dataclasses import replace

import pytest
import torch
from decision_rows import build, gradients, plain_logits, row_by_row
from fakes import make_slate
from transformers import LlamaConfig, LlamaForCausalLM

from retrail.models.backbone import tiny_twin
from retrail.models.config import DecisionConfig, ModelConfig
from retrail.models.decision.batch import SlateBatch
from retrail.models.decision.build import build_decision
from retrail.models.decision.model import DecisionModel

CPU = torch.device("cpu")
KINDS = ["tiny:llama", "tiny:qwen3"]
SLATES = [make_slate(3), make_slate(1), make_slate(5), make_slate(2, seed=1)]


@pytest.fixture
def eager_kernels():
    """FlexAttention without a compiler: the same maths, unfused."""
    with torch.compiler.set_stance("force_eager"):
        yield


def brute_choice(net, layout, slates):
    """Log-probability of each whole label with one plain forward pass an option."""
    values = []
    for slate in map(layout.render_choice, slates):
        for label in slate.branches:
            logp = plain_logits(net, slate.trunk + label).log_softmax(-1)
            start = len(slate.trunk) - 1
            values.append(sum(logp[start + n, token] for n, token in enumerate(label)))
    return torch.stack(values)


def batch_of(layout, slates):
    return SlateBatch.of([layout.render(slate) for slate in slates])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("way", ["two_pass", "packed"])
@torch.no_grad()
def test_packed_slates_equal_row_by_row(kind, attention, way):
    net, layout = build(kind, attention)
    net.attention = way
    expected = row_by_row(net, map(layout.render, SLATES))
    assert expected.std() > 1e-3  # else equal answers would prove nothing
    torch.testing.assert_close(net.yes_logits(batch_of(layout, SLATES)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["two_pass", "packed"])
@torch.no_grad()
def test_flex_attention_equals_row_by_row(way, eager_kernels):
    net, layout = build("tiny:llama", "flex_attention")
    assert net.attention == "packed"
    net.attention = way
    plain, _ = build("tiny:llama", "sdpa")
    slates = [make_slate(3), make_slate(7, seed=2)]
    batch = batch_of(layout, slates)
    assert batch.trunk_ST.shape[1] > 256 and batch.branch_SL.shape[1] > 64  # several blocks of 128
    torch.testing.assert_close(net.yes_logits(batch), row_by_row(plain, map(layout.render, slates)), atol=1e-5, rtol=0)
    choices = SlateBatch.of([layout.render_choice(slate) for slate in slates])
    torch.testing.assert_close(net.choice_logits(choices), brute_choice(plain, layout, slates), atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["two_pass", "packed", "recomputed"])
def test_gradients_equal_row_by_row(way):
    net, layout = build()
    net.train().requires_grad_(True)
    expected = gradients(net, row_by_row(net, map(layout.render, SLATES)))
    assert len(expected) > 10 and max(g.abs().max() for g in expected.values()) > 1e-2
    if way == "recomputed":  # a layer that is computed twice cannot fill a cache
        net.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        net.attention = way
    got = gradients(net, net.yes_logits(batch_of(layout, SLATES)))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_of_the_choice_equal_brute_force():
    net, layout = build()
    net.train().requires_grad_(True)
    expected = gradients(net, brute_choice(net, layout, SLATES))
    got = gradients(net, net.choice_logits(SlateBatch.of([layout.render_choice(s) for s in SLATES])))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("way", ["two_pass", "packed"])
@torch.no_grad()
def test_other_questions_change_no_answer(way):
    net, layout = build()
    net.attention = way
    slate = make_slate(6)
    every = net.yes_logits(SlateBatch.of([layout.render(slate)]))
    for asked in ([0], [5], [2, 3], [5, 4, 3, 2, 1, 0], [1, 1, 4], [3, 0, 5]):
        some = net.yes_logits(SlateBatch.of([layout.render(slate, questions=asked)]))
        torch.testing.assert_close(some, every[asked], atol=1e-5, rtol=0)


@torch.no_grad()
def test_other_questions_change_no_answer_of_the_pointer():
    net, layout = build(head="pointer")
    slate = make_slate(6)
    every = net.yes_logits(SlateBatch.of([layout.render(slate)]))
    some = net.yes_logits(SlateBatch.of([layout.render(slate, questions=[4, 0])]))
    torch.testing.assert_close(some, every[[4, 0]], atol=1e-6, rtol=0)


@pytest.mark.parametrize("way", ["two_pass", "packed"])
@torch.no_grad()
def test_choice_equals_brute_force(way):
    net, layout = build("tiny:qwen3")
    net.attention = way
    slates = [make_slate(12), make_slate(2), make_slate(5)]
    got = net.choice_logits(SlateBatch.of([layout.render_choice(slate) for slate in slates]))
    torch.testing.assert_close(got, brute_choice(net, layout, slates), atol=1e-5, rtol=0)


@torch.no_grad()
def test_choice_among_255_options(monkeypatch):
    net, layout = build()
    slate = make_slate(255, words=1)
    seen = record_lm_head(net, monkeypatch)
    logits = net.choice_logits(SlateBatch.of([layout.render_choice(slate)]))
    assert max(seen) <= 64
    assert logits.double().softmax(0).sum().item() == pytest.approx(1, abs=1e-9)
    some = [0, 8, 9, 98, 99, 254]
    packed = layout.render_choice(slate)
    for n in some:
        logp = plain_logits(net, packed.trunk + packed.branches[n]).log_softmax(-1)
        start = len(packed.trunk) - 1
        by_hand = sum(logp[start + i, token] for i, token in enumerate(packed.branches[n]))
        assert logits[n].item() == pytest.approx(by_hand.item(), abs=1e-4)


@torch.no_grad()
def test_choice_among_options_of_one_token():
    """A tokenizer may write "3]" as one token: then there is nothing behind the label's first token."""
    net, layout = build()
    packed = layout.render_choice(make_slate(3))
    packed = replace(packed, branches=[branch[:1] for branch in packed.branches], label_tokens=[1, 1, 1])
    logp = plain_logits(net, packed.trunk)[-1].log_softmax(-1)
    expected = torch.stack([logp[branch[0]] for branch in packed.branches])
    torch.testing.assert_close(net.choice_logits(SlateBatch.of([packed])), expected, atol=1e-5, rtol=0)


def record_lm_head(net, monkeypatch):
    """The number of rows of every tensor that goes through the LM head."""
    seen = []
    head = net.backbone.get_output_embeddings()
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda x: (seen.append(x.numel() // x.shape[-1]), forward(x))[1])
    return seen


@torch.no_grad()
def test_readout_is_the_full_softmax_restricted_to_yes_and_no(monkeypatch):
    net, layout = build()
    batch = batch_of(layout, SLATES)
    seen = record_lm_head(net, monkeypatch)
    states = net.read_states(batch)
    log_odds, mass = net.log_odds(states), net.label_mass(states)
    assert max(seen) == len(states) == 11 < batch.num_tokens  # as many rows as questions, and no more
    logp = net.backbone.lm_head(states).log_softmax(-1)[:, list(net.label_ids)]
    p_yes = logp.exp()[:, 0] / logp.exp().sum(-1)
    torch.testing.assert_close(torch.sigmoid(log_odds), p_yes, atol=1e-6, rtol=0)
    torch.testing.assert_close(mass, logp.exp().sum(-1), atol=1e-6, rtol=0)
    seen.clear()
    net.yes_logits(batch)
    assert seen == []  # two rows of its weight are enough
    torch.testing.assert_close(net.label_mass(states.repeat(20, 1)), mass.repeat(20))
    assert max(seen) == 64


@torch.no_grad()
def test_a_bias_of_the_lm_head_counts():
    net, layout = build()
    before = net.yes_logits(batch_of(layout, SLATES))
    head = net.backbone.lm_head
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    head.bias[net.label_ids[0]], head.bias[net.label_ids[1]] = 0.75, -0.5
    after = net.yes_logits(batch_of(layout, SLATES))
    torch.testing.assert_close(after, before + 1.25, atol=1e-5, rtol=0)
    torch.testing.assert_close(after, row_by_row(net, map(layout.render, SLATES)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("final_logit_softcapping", 30.0), ("logit_scale", 0.06), ("logits_scaling", 8.0), ("sliding_window", 64),
     ("layer_types", ["full_attention", "sliding_attention"]), ("layer_types", ["linear_attention", "full_attention"])],
)  # fmt: skip
def test_models_that_the_readout_would_misread_are_refused(key, value):
    model, _ = tiny_twin("llama", CPU, torch.float32, "sdpa")
    setattr(model.config, key, value)
    named = "(sliding|linear)_attention" if key == "layer_types" else key
    with pytest.raises(ValueError, match=rf"llama.*{named}.*pointer"):
        DecisionModel(model, (1, 2))
    DecisionModel(model, None)


def test_unknown_way_of_attention_is_refused():
    model, _ = tiny_twin("llama", CPU, torch.float32, "sdpa")
    with pytest.raises(ValueError, match="attention='dense' is not a choice"):
        DecisionModel(model, None, "dense")


@pytest.mark.parametrize("readout", ["late", "end"])
def test_gradients_of_the_pointer_do_not_depend_on_padding(readout):
    net, layout = build(head="pointer", readout=readout)
    net.train().requires_grad_(True)
    slates = [layout.render(slate) for slate in SLATES]
    expected = gradients(net, torch.cat([net.yes_logits(SlateBatch.of([slate])) for slate in slates]))
    got = gradients(net, net.yes_logits(SlateBatch.of(slates)))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_one_call_gives_training_both_answers():
    net, layout = build()
    batch = batch_of(layout, SLATES)
    choices = SlateBatch.of([layout.render_choice(slate) for slate in SLATES])
    yes, choice = net(batch, choices)
    assert torch.equal(yes, net.yes_logits(batch)) and torch.equal(choice, net.choice_logits(choices))
    assert net(batch)[1] is None
    assert batch.num_tokens == sum(s.num_tokens for s in batch.slates) < batch.num_padded_tokens


def test_padding_ids_change_nothing():
    net, layout = build()
    batch = batch_of(layout, SLATES)
    with torch.no_grad():
        expected = net.yes_logits(batch)
        trunk, branch = batch.trunk_ST.clone(), batch.branch_SL.clone()
        padding = torch.arange(trunk.shape[1]) >= batch.trunk_len_S[:, None]
        assert padding.any() and (batch.until_SL < 0).any()
        trunk[padding], branch[batch.until_SL < 0] = 7, 9
        other = replace(batch, trunk_ST=trunk, branch_SL=branch)
        torch.testing.assert_close(net.yes_logits(other), expected, atol=1e-6, rtol=0)


def test_lora_in_the_layers_is_seen_by_both_passes():
    """The decoder inside a PEFT model is the adapted one."""
    from retrail.models.config import AdapterConfig

    net, layout = build_decision(
        ModelConfig(path="tiny:llama", dtype="float32"), DecisionConfig(head="yes_no"), CPU, AdapterConfig(rank=4)
    )
    with torch.no_grad():
        before = net.yes_logits(batch_of(layout, SLATES))
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        got = net.yes_logits(batch_of(layout, SLATES))
        assert (got - before).abs().max() > 1e-2
        torch.testing.assert_close(got, row_by_row(net, map(layout.render, SLATES)), atol=1e-5, rtol=0)


def test_untied_head_is_read():
    settings = LlamaConfig(
        vocab_size=270, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(settings).eval()
    _, layout = build()
    net = DecisionModel(model, layout.label_ids)
    with torch.no_grad():
        torch.testing.assert_close(
            net.yes_logits(batch_of(layout, SLATES)),
            row_by_row(net, map(layout.render, SLATES)),
            atol=1e-5,
            rtol=0,
        )
    assert copy.deepcopy(net).label_ids == net.label_ids
