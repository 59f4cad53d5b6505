"""The state objective: one forward a chain against one row a state, masks, weights, and exact caching of gradients."""

import math

import numpy as np
import pytest
import torch
from state_toy import tiny_encoder, toy_pairs, toy_rows, toy_state

from retrail.models.protocols import State
from retrail.models.recursive.prompts import wordings
from retrail.models.recursive.state_model import StateBatch, StateModel
from retrail.train.config import OptimConfig, RuntimeConfig, StateObjectiveConfig
from retrail.train.distributed import Ranks, make_accelerator
from retrail.train.optim import Optimizer
from retrail.train.sampler import Sampler
from retrail.train.step import Stepper

ROWS = [(0, 0), (3, 0), (7, 1), (12, 0)]


def alone(model, ids):
    """The vector of one token list, by one plain pass of its own."""
    hidden = (
        model.backbone.get_base_model().base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
    )
    return torch.nn.functional.normalize(hidden[0, -1].float(), dim=0)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_one_forward_a_chain_equals_one_row_a_state():
    model, objective = toy_state(recovery_share=1.0)
    batch = objective.collate(ROWS)
    examples = batch.examples
    vectors = objective.represent(model, batch)
    lists = [ids for e in examples for ids in e.states] + [ids for e in examples for ids in e.doc_tokens]
    rows = torch.stack([alone(model, ids) for ids in lists])
    torch.testing.assert_close(vectors, rows, atol=1e-5, rtol=0)
    # What they share is computed once.
    assert batch.tokens.num_tokens < sum(map(len, lists))
    facts = [[objective.facts(batch)]]
    objective.contrast(vectors, facts, 0, [batch]).sums["infonce"].backward()
    packed = gradients(model)
    model.zero_grad()
    objective.contrast(rows, facts, 0, [batch]).sums["infonce"].backward()
    for name, gradient in gradients(model).items():
        assert float((packed[name] - gradient).abs().max()) < 1e-5 * float(gradient.abs().max())
    assert sum(g.abs().sum() for g in packed.values()) > 0


def test_training_sees_the_vectors_that_a_search_compares():
    for kept in (None, 16):
        model, objective = toy_state(kept=kept)
        example = objective.collate([(3, 0)]).examples[0]
        states, documents = model(StateBatch.of([example.states], example.doc_tokens))
        encoder = objective.encoder
        for vectors, lists in ((states, example.states), (documents, example.doc_tokens)):
            found, _ = encoder.encode_tokens(lists)
            assert vectors.shape == (len(lists), kept or 64)
            assert np.abs(vectors.detach().numpy() - found).max() < 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "mean"}, "encoder.pooling=mean cannot be trained: .* set it to last"),
        ({"normalise": False}, "encoder.normalise=False cannot be trained: .* set it to True"),
    ],
)
def test_vectors_that_training_does_not_make_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        StateModel(tiny_encoder(**settings))


def test_dimensions_that_vectors_lack_are_refused():
    with pytest.raises(ValueError, match=r"contrast.dimensions=\[8, 32\], but vectors have 16"):
        toy_state(kept=16, dimensions=[8, 32])


def test_attention_in_both_directions_is_refused():
    encoder = tiny_encoder()
    encoder.backbone.config.is_causal = False
    with pytest.raises(ValueError, match="model.path=.* attends in both directions"):
        StateModel(encoder)


def test_states_are_rendered_as_a_search_renders_them():
    _, objective = toy_state(recovery_share=1.0, paraphrases=False)
    part, encoder = objective.parts[0], objective.encoder
    example = objective.collate([(5, 0)]).examples[0]
    drawn = part.draw(5, 0, objective._draw)
    texts = {row: f"{part.corpus.title(row)}\n{part.corpus.text(row)}" for row in range(len(part.corpus))}
    wanted = []
    for target in drawn.targets():
        role = "recovery_view" if target.role == "recovery" else target.role
        wanted.append(encoder.tokens(State(drawn.query, tuple(texts[d] for d in target.observed), role)))
    assert list(example.states) == wanted and len(wanted) == 4
    assert [encoder.document_tokens(texts[d]) for d in example.documents] == list(example.doc_tokens)


def test_wordings_are_drawn_and_the_first_is_that_of_a_search():
    _, objective = toy_state()
    heads = set()
    for epoch in range(12):
        ids = objective.collate([(1, epoch)]).examples[0].states[0]
        heads.add(objective.encoder.tokenizer.hf.decode(ids).split("\n")[0])
    assert len(heads) > 1 and heads <= {f"Instruct: {words}" for words in wordings("multi-hop", "root")}
    _, fixed = toy_state(paraphrases=False)
    ids = fixed.collate([(1, 5)]).examples[0].states[0]
    assert fixed.encoder.tokenizer.hf.decode(ids).split("\n")[0] == f"Instruct: {wordings('multi-hop', 'root')[0]}"


def test_loss_is_that_of_plain_loops():
    model, objective = toy_state([toy_rows(), toy_pairs()], recovery_share=0.5, margin=0.1, recovery_weight=0.25,
                                 hop_weights=[2.0, 3.0])  # fmt: skip
    batch = objective.collate([*ROWS, (16, 0), (17, 0)])  # the last two are of one group
    vectors = objective.represent(model, batch).detach().double()
    states = [(e, r, n) for e, r in zip(batch.examples, batch.rows, strict=True) for n in range(len(e.states))]
    documents = [(e, r, n) for e, r in zip(batch.examples, batch.rows, strict=True) for n in range(len(e.documents))]
    offset = len(states)
    total = weight_sum = 0.0
    for s, (example, row, n) in enumerate(states):
        place = next(j for j, (e, _, m) in enumerate(documents) if e is example and m == example.positive[n])
        score = float(vectors[s] @ vectors[offset + place])
        right = {t for e, _, m in documents for t in [e.texts[m]] if e.documents[m] in example.right}
        right.add(example.texts[example.positive[n]])
        z, taken = math.exp(score / 0.05), set()
        for j, (e, other, m) in enumerate(documents):
            skip = e.texts[m] in right or e.texts[m] in taken or (e.group == example.group and other != row)
            if not skip:
                taken.add(e.texts[m])
                rival = float(vectors[s] @ vectors[offset + j])
                if rival <= score + 0.1:
                    z += math.exp(rival / 0.05)
        total += example.weights[n] * (math.log(z) - score / 0.05)
        weight_sum += example.weights[n]
    parts = objective.loss(model, batch)
    assert float(parts.sums["infonce"].detach()) == pytest.approx(total, rel=1e-4)
    assert batch.counts["infonce"] == pytest.approx(weight_sum)
    assert {w for e in batch.examples for w in e.weights} == {2.0, 3.0, 0.25}


def steps(batch_size, max_tokens, dropout=0.0, count=2, **contrast):
    """(loss, gradients) of each step of one process."""
    torch.manual_seed(5)
    model, objective = toy_state([toy_rows(), toy_pairs()], **contrast)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) or type(module).__name__ == "Identity":
            module.p = dropout
    if dropout:
        for module in model.modules():
            if hasattr(module, "lora_dropout"):
                for name in module.lora_dropout:
                    module.lora_dropout[name] = torch.nn.Dropout(dropout)
    model.train()
    accelerator = make_accelerator(RuntimeConfig(device="cpu", threads=1))
    ranks = Ranks(accelerator)
    seen = []

    class Watched(Optimizer):
        def step(self, step):
            seen.append({name: p.grad.clone() for name, p in self.parameters.items()})
            return super().step(step)

    optimizer = Watched(model, OptimConfig(lr=1e-3, warmup_ratio=0.0, max_grad_norm=1e9), 10)
    sampler = Sampler(
        num_rows=objective.num_rows, length=objective.length, seed=0, batch_size=batch_size, max_tokens=max_tokens
    )
    stepper = Stepper(accelerator=accelerator, ranks=ranks, model=accelerator.prepare_model(model), objective=objective,
                      sampler=sampler, optimizer=optimizer)  # fmt: skip
    reports = [stepper(n, lambda: 0) for n in range(count)]
    ranks.close()
    return [report.loss for report in reports], seen, len(sampler.plan(0, 1)[0]), reports


@pytest.mark.parametrize("contrast", [{}, {"states_too": True, "documents_too": True, "dimensions": [16, 32]}])
def test_cached_gradients_are_exact(contrast):
    whole, one, microbatches, _ = steps(8, 100_000, **contrast)
    assert microbatches == 1
    parts, many, microbatches, _ = steps(8, 700, **contrast)
    assert microbatches > 3
    assert parts == pytest.approx(whole, rel=1e-5)
    for a, b in zip(one, many, strict=True):
        for name in a:
            # A vector's own rounding, 1e-7, counts 1 / temperature times.
            assert float((b[name] - a[name]).abs().max()) < 5e-5 * float(a[name].abs().max())


def test_the_second_pass_draws_the_same_dropout(monkeypatch):
    import retrail.train.step as module

    _, kept, _, _ = steps(4, 700, dropout=0.3, count=1)
    monkeypatch.setattr(module, "_set_noise", lambda *args: None)
    _, lost, _, _ = steps(4, 700, dropout=0.3, count=1)
    assert any(not torch.allclose(kept[0][name], lost[0][name], rtol=1e-3) for name in kept[0])


def test_the_temperature_counts_in_a_cached_step():
    cold, _, _, _ = steps(6, 700, count=1, temperature=0.02)
    warm, _, _, _ = steps(6, 700, count=1, temperature=1.0)
    whole, _, _, _ = steps(6, 100_000, count=1, temperature=0.02)
    assert cold == pytest.approx(whole, rel=1e-5) and abs(cold[0] - warm[0]) > 0.1


def test_training_finds_what_it_is_taught():
    _, _, _, reports = steps(16, 100_000, count=1)
    torch.manual_seed(0)
    # The margin leaves out what is ranked above the positive, which helps only a model that knows something.
    model, objective = toy_state(full=True, recovery_share=0.3, negatives=3, margin=None, paraphrases=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.002)
    model.train()
    first = last = None
    for step in range(40):
        batch = objective.collate([(row, 0) for row in range(8)])
        parts = objective.loss(model, batch)
        loss = parts.sums["infonce"] / batch.counts["infonce"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(parts.logs["hit"]) / batch.counts["hit"]
        first = last if step == 0 else first
    assert last > first + 0.3 and reports[0].logs["hit"] <= 1.0


def test_an_empty_batch_counts_nothing():
    model, objective = toy_state()
    batch = objective.collate([])
    assert set(batch.counts.values()) == {0.0} and batch.names == () and batch.num_tokens == 0
    assert objective.represent(model, batch).shape == (0, 64)
    assert float(objective.loss(model, batch).sums["infonce"].detach()) == 0


def test_states_alone_and_padding_change_no_vector():
    model, objective = toy_state()
    short, long = objective.collate([(0, 0)]).examples[0], objective.collate([(3, 0)]).examples[0]
    both = StateBatch.of([short.states, long.states], [*short.doc_tokens, *long.doc_tokens])
    states, documents = model(both)
    one, own = model(StateBatch.of([short.states], short.doc_tokens))
    torch.testing.assert_close(states[: len(one)], one, atol=1e-5, rtol=0)
    torch.testing.assert_close(documents[: len(own)], own, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "contrast.temperature=0 must be above 0"),
        ({"negatives": 8}, "contrast.negatives=8 must be between 0 and 7"),
        ({"recovery_share": 2}, "contrast.recovery_share=2 must be between 0 and 1"),
        ({"hop_weights": []}, r"contrast.hop_weights=\[\] must list"),
        ({"dimensions": [0]}, r"contrast.dimensions=\[0\] must list"),
        ({"rival_ranks": [5, 1]}, r"contrast.rival_ranks=\[5, 1\] must be"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        StateObjectiveConfig(**settings)
