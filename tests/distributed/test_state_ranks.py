"""The contrastive step on several ranks: the loss and every gradient are those of one rank."""

import pytest
import torch
from dist import run_ranks
from state_toy import toy_pairs, toy_rows, toy_state

from retrail.train.config import OptimConfig, RuntimeConfig
from retrail.train.distributed import Ranks, make_accelerator
from retrail.train.optim import Optimizer
from retrail.train.sampler import Sampler
from retrail.train.step import Stepper

pytestmark = pytest.mark.dist


def train(batch_size, max_tokens, options):
    """(loss, logs, gradients) of each step, and the most microbatches and empty ones that this rank had."""
    torch.manual_seed(0)
    model, objective = toy_state([toy_rows(), toy_pairs()], recovery_share=0.5, **options)
    model.train()
    accelerator = make_accelerator(RuntimeConfig(device="cpu", threads=1))
    ranks = Ranks(accelerator)
    seen = {}

    class Watched(Optimizer):
        def step(self, step):
            seen.update({name: p.grad.clone() for name, p in self.parameters.items()})
            return super().step(step)

    wrapped = accelerator.prepare_model(model)
    optimizer = Watched(model, OptimConfig(lr=1e-3, warmup_ratio=0.0, max_grad_norm=1e9), 10)
    sampler = Sampler(
        num_rows=objective.num_rows, length=objective.length, seed=2, batch_size=batch_size, max_tokens=max_tokens
    )
    stepper = Stepper(
        accelerator=accelerator, ranks=ranks, model=wrapped, objective=objective, sampler=sampler, optimizer=optimizer
    )
    out, empty, most = [], 0, 0
    for step in range(2):
        plan = sampler.plan(step, ranks.size)[ranks.rank]
        empty, most = empty + sum(not rows for rows in plan), max(most, len(plan))
        report = stepper(step, lambda: 0)
        out.append((report.loss, dict(report.logs), {n: g.numpy().copy() for n, g in seen.items()}))
    ranks.close()
    return out, empty, most


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("batch_size", "max_tokens", "options"),
    [
        pytest.param(5, 100_000, {}, id="uneven"),
        pytest.param(7, 700, {"states_too": True, "documents_too": True}, id="several microbatches"),
        pytest.param(1, 100_000, {}, id="an empty rank"),
    ],
)
def test_ranks_are_one(world, batch_size, max_tokens, options):
    one, _, _ = train(batch_size, 100_000, options)
    many = run_ranks(train, world, batch_size, max_tokens, options)
    if batch_size == 1:
        assert any(empty for _, empty, _ in many)
    if max_tokens < 1000:
        assert max(most for _, _, most in many) > 1
    for steps, _, _ in many:
        for (loss, logs, gradients), (wanted, wanted_logs, wanted_gradients) in zip(steps, one, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert logs == pytest.approx(wanted_logs)
            for name, gradient in gradients.items():
                # A vector's own rounding, 1e-7, counts 1 / temperature times.
                assert abs(gradient - wanted_gradients[name]).max() < 5e-5 * abs(wanted_gradients[name]).max(), name
