"""The decision objective on two ranks: the loss and every gradient are those of one rank."""

import pytest
import torch
from decision_toy import shake, tiny_decision, toy_corpus, toy_objective, toy_queries
from dist import run_ranks

from retrail.models.config import AdapterConfig
from retrail.train.config import DecisionObjectiveConfig, OptimConfig, RuntimeConfig
from retrail.train.distributed import Ranks, make_accelerator
from retrail.train.objectives.decision import DecisionObjective, gold_path_rows
from retrail.train.objectives.mixed import MixedObjective
from retrail.train.optim import Optimizer
from retrail.train.sampler import Sampler
from retrail.train.step import Stepper

pytestmark = pytest.mark.dist
STEPS = 2


class Gradients(Optimizer):
    """Keeps what each step would have applied."""

    def step(self, step):
        self.seen = {name: p.grad.clone() for name, p in self.parameters.items()}
        return super().step(step)


def mixture(layout, seed, **settings):
    """Two data sets, of which one is seen three times as often, with all weights."""
    config = DecisionObjectiveConfig(
        min_candidates=3, max_candidates=6, level_weights=[3.0, 0.5], positive_weights=[4.0, 1.0], **settings
    )
    parts = []
    for name, size in (("a", (4, 4)), ("b", (3, 3))):
        corpus = toy_corpus(*size)
        rows = gold_path_rows(corpus, *toy_queries(corpus))
        parts.append(DecisionObjective(rows, corpus, layout, config, seed=seed, name=name))
    return MixedObjective(parts, [1.0, 3.0], seed=seed)


def train(head, queries, batch_size, max_tokens, mixed=False):
    """(loss, terms, gradients) of each step, and the most microbatches and empty ones that this rank had."""
    torch.manual_seed(0)
    order = "candidates_first" if queries > 1 else "query_first"
    model, layout = tiny_decision(head, AdapterConfig(rank=4), order=order)
    shake(model)
    model.train()
    if mixed:
        objective = mixture(layout, 2, none_share=0.3, queries=queries, easy_rows=5, none_weight=0.5)
    else:
        objective = toy_objective(layout, none_share=0.3, queries=queries, none_weight=0.5)
    accelerator = make_accelerator(RuntimeConfig(device="cpu", threads=1))
    ranks = Ranks(accelerator)
    wrapped = accelerator.prepare_model(model)
    optimizer = Gradients(model, OptimConfig(lr=1e-3, warmup_ratio=0.0, max_grad_norm=1e9), 10)
    sampler = Sampler(
        num_rows=objective.num_rows, length=objective.length, seed=2, batch_size=batch_size, max_tokens=max_tokens
    )
    stepper = Stepper(
        accelerator=accelerator, ranks=ranks, model=wrapped, objective=objective, sampler=sampler, optimizer=optimizer
    )
    out, empty, most = [], 0, 0
    for step in range(STEPS):
        plan = sampler.plan(step, ranks.size)[ranks.rank]
        empty, most = empty + sum(not rows for rows in plan), max(most, len(plan))
        report = stepper(step, lambda: 0)
        out.append((report.loss, dict(report.terms), {n: g.numpy() for n, g in optimizer.seen.items()}))
    ranks.close()
    return out, empty, most


@pytest.mark.parametrize(("head", "queries"), [("pointer", 1), ("yes_no", 1), ("pointer", 4), ("yes_no", 4)])
@pytest.mark.parametrize(
    ("batch_size", "max_tokens", "empty", "microbatches"),
    [
        pytest.param(5, 100_000, 0, 1, id="uneven"),
        pytest.param(3, 10, 1, 2, id="an empty microbatch"),
        pytest.param(1, 100_000, 1, 1, id="an empty rank"),
    ],
)
def test_two_ranks_are_one(head, queries, batch_size, max_tokens, empty, microbatches):
    # In this process, which also loads for the forks what they would load one by one.
    one, _, _ = train(head, queries, batch_size, max_tokens)
    two = run_ranks(train, 2, head, queries, batch_size, max_tokens)
    assert_same(one, two, empty, microbatches)


@pytest.mark.parametrize(("head", "queries"), [("yes_no", 1), ("pointer", 4)])
@pytest.mark.parametrize(
    ("batch_size", "max_tokens", "empty", "microbatches"),
    [
        pytest.param(7, 10, 1, 4, id="an empty microbatch"),
        pytest.param(1, 100_000, 1, 1, id="an empty rank"),
    ],
)
def test_two_ranks_of_a_weighted_mixture_are_one(head, queries, batch_size, max_tokens, empty, microbatches):
    one, _, _ = train(head, queries, batch_size, max_tokens, mixed=True)
    two = run_ranks(train, 2, head, queries, batch_size, max_tokens, True)
    assert_same(one, two, empty, microbatches)


def assert_same(one, two, empty, microbatches):
    assert sum(rank[1] for rank in two) == empty * STEPS
    assert max(rank[2] for rank in two) == microbatches
    for steps, _, _ in two:
        for step, ((loss, terms, gradients), (loss_2, terms_2, gradients_2)) in enumerate(zip(one, steps, strict=True)):
            # The first step starts from the same parameters; later ones carry Adam's rounding.
            rounding = 1e-5 if step == 0 else 1e-4
            assert loss_2 == pytest.approx(loss, rel=1e-5)
            assert terms_2 == pytest.approx(terms, rel=1e-5)
            assert gradients.keys() == gradients_2.keys()
            assert any("lora_A" in name for name in gradients)
            for name, gradient in gradients.items():
                assert abs(gradient).max() > 0, name
                torch.testing.assert_close(
                    torch.from_numpy(gradients_2[name]), torch.from_numpy(gradient), rtol=1e-3, atol=rounding, msg=name
                )
