import math

import pytest
import torch
from torch import nn
from toy_objective import ToyModel

from retrail.train.config import OptimConfig
from retrail.train.optim import Optimizer, lr_multiplier


def values(schedule, max_steps=10, **config):
    config = OptimConfig(schedule=schedule, **config)
    return [lr_multiplier(step, config, max_steps) for step in range(max_steps)]


def test_constant_by_hand():
    assert values("constant", 5, warmup_ratio=0.4) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert values("constant", 3, warmup_ratio=0.0) == [1.0, 1.0, 1.0]


def test_linear_by_hand():
    # W = 2; then t = 0, 1/8, ..., 7/8.
    expected = [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert values("linear", warmup_ratio=0.2) == pytest.approx(expected)
    # m = 0.2: 0.2 + 0.8 * (1 - t).
    assert values("linear", 4, warmup_ratio=0.0, min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_by_hand():
    # W = 0, t = 0, 1/4, 1/2, 3/4.
    half = math.sqrt(0.5) / 2
    assert values("cosine", 4, warmup_ratio=0.0) == pytest.approx([1.0, 0.5 + half, 0.5, 0.5 - half])
    low = values("cosine", 4, warmup_ratio=0.0, min_lr_ratio=0.1)
    assert low == pytest.approx([1.0, 0.1 + 0.9 * (0.5 + half), 0.55, 0.1 + 0.9 * (0.5 - half)])


def test_wsd_by_hand():
    # W = 1, D = 4: steps 6..9 fall by quarters.
    expected = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert values("wsd", warmup_ratio=0.1, decay_ratio=0.4) == pytest.approx(expected)
    assert values("wsd", 4, warmup_ratio=0.0, decay_ratio=0.0) == [1.0] * 4


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 17])
def test_no_step_is_wasted(schedule, max_steps):
    assert all(0.0 < v <= 1.0 for v in values(schedule, max_steps, warmup_ratio=0.3))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("warmup_ratio", 1.5),
        ("lr", 0.0),
        ("head_lr", -1.0),
        ("beta1", 1.0),
        ("schedule", "cosin"),
        ("weight_decay", -1),
    ],
)
def test_config_names_key_and_value(key, value):
    with pytest.raises(ValueError, match=f"optim.{key}={value!r}"):
        OptimConfig(**{key: value})


def test_groups():
    model = ToyModel()
    optimizer = Optimizer(model, OptimConfig(lr=1.0, head_lr=3.0, weight_decay=0.1, warmup_ratio=0.0), 10)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        names[id(p)]: (base, group["weight_decay"])
        for group, base in zip(optimizer.adamw.param_groups, optimizer.base_lrs, strict=True)
        for p in group["params"]
    }
    assert found == {
        "embed.weight": (1.0, 0.1),
        "body.weight": (1.0, 0.1),
        "norm.weight": (1.0, 0.0),
        "norm.bias": (1.0, 0.0),
        "body.bias": (1.0, 0.0),
        "head.weight": (3.0, 0.1),
        "head.bias": (3.0, 0.0),
    }


def test_two_dimensional_norm_does_not_decay():
    class GroupedNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

    optimizer = Optimizer(nn.Sequential(GroupedNorm()), OptimConfig(weight_decay=0.5), 1)
    assert [group["weight_decay"] for group in optimizer.adamw.param_groups] == [0.0]


def test_first_step_by_hand():
    # AdamW's first step moves each weight by lr * sign(gradient) (bias-corrected, eps ~ 0), after decay by lr * wd.
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0]]))
    optimizer = Optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5, warmup_ratio=0.5), 4)
    model.weight.grad = torch.tensor([[3.0, -4.0]])
    assert optimizer.step(0) == pytest.approx(0.05)
    assert model.weight.detach()[0].tolist() == pytest.approx([2.0 * 0.975 - 0.05, -1.0 * 0.975 + 0.05])
    assert model.weight.grad is None


def test_state_round_trip_continues_exactly():
    def run(model, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for p in optimizer.parameters.values():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step(step)

    config = OptimConfig(lr=0.05, head_lr=0.1, weight_decay=0.1)
    one = ToyModel()
    first = Optimizer(one, config, 10)
    run(one, first, range(4))
    two = ToyModel()
    two.load_state_dict(one.state_dict())
    second = Optimizer(two, config, 10)
    second.load_tensors({name: t.clone() for name, t in first.tensors().items()})
    assert set(first.tensors()) == {f"{k}:{n}" for k in ("step", "exp_avg", "exp_avg_sq") for n in first.names}
    run(one, first, range(4, 10))
    run(two, second, range(4, 10))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_state_of_another_model_is_refused():
    optimizer = Optimizer(ToyModel(), OptimConfig(), 10)
    with pytest.raises(ValueError, match="'exp_avg:lora.A'"):
        optimizer.load_tensors({"exp_avg:lora.A": torch.zeros(1)})


def test_nothing_to_train():
    model = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="adapter.kind"):
        Optimizer(model, OptimConfig(), 10)
