"""AdamW groups and learning-rate schedules. A schedule is a pure function of the step: it has no state to save."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .config import OptimConfig

HEAD_PREFIX = "head."


def lr_multiplier(step: int, config: OptimConfig, max_steps: int) -> float:
    """What the learning rates of step `step` (counted from 0) are multiplied with, above 0 and at most 1.

    With W = round(warmup_ratio * max_steps): (step + 1) / W while step < W, so that no step is spent at zero; then
    with t = (step - W) / (max_steps - W) and m = min_lr_ratio:
    cosine m + (1 - m)(1 + cos(pi t)) / 2 (Loshchilov & Hutter 2017), linear m + (1 - m)(1 - t), constant 1,
    and wsd 1 until the last D = round(decay_ratio * max_steps) steps, then linear down to m (Hu et al. 2024).
    """
    warmup = round(config.warmup_ratio * max_steps)
    if step < warmup:
        return (step + 1) / warmup
    low = config.min_lr_ratio
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        decay = round(config.decay_ratio * max_steps)
        done = max(0, step - (max_steps - decay)) / decay if decay else 0.0
        return low + (1.0 - low) * (1.0 - done)
    done = (step - warmup) / max(1, max_steps - warmup)
    if config.schedule == "cosine":
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * done))
    return low + (1.0 - low) * (1.0 - done)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take a gradient, by name; shared ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _norm_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            yield from module.parameters(recurse=False)


class Optimizer:
    """AdamW whose groups know the names of their parameters.

    Groups: {backbone, head} x {decays, does not}. `head` are names that start with `head.`; vectors and scalars,
    biases and parameters of modules whose class is called a norm do not decay.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, max_steps: int) -> None:
        self.config = config
        self.max_steps = max_steps
        self.parameters = trainable(model)
        if not self.parameters:
            raise ValueError(
                "no parameter of the model takes a gradient: nothing would be trained (look at adapter.kind)"
            )
        plain = {id(p) for p in _norm_parameters(model)}
        groups: dict[tuple[bool, bool], list[str]] = {}
        for name, p in self.parameters.items():
            decays = p.ndim >= 2 and not name.endswith("bias") and id(p) not in plain
            groups.setdefault((name.startswith(HEAD_PREFIX), decays), []).append(name)
        head_lr = config.lr if config.head_lr is None else config.head_lr
        self.base_lrs = [head_lr if head else config.lr for head, _ in groups]
        self.names = [name for names in groups.values() for name in names]
        self.adamw = torch.optim.AdamW(
            [
                {
                    "params": [self.parameters[name] for name in names],
                    "weight_decay": config.weight_decay if decays else 0.0,
                }
                for (_, decays), names in groups.items()
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=all(p.is_cuda and p.is_floating_point() for p in self.parameters.values()),
        )

    def step(self, step: int) -> float:
        """Take step `step` (counted from 0), clear the gradients, and return the backbone's learning rate."""
        multiplier = lr_multiplier(step, self.config, self.max_steps)
        for group, base in zip(self.adamw.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * multiplier
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return self.config.lr * multiplier

    def gradients(self) -> list[Tensor]:
        """The gradients there are, in the order of the groups."""
        return [p.grad for name in self.names if (p := self.parameters[name]).grad is not None]

    def tensors(self) -> dict[str, Tensor]:
        """AdamW's state as flat tensors: `exp_avg:NAME`, `exp_avg_sq:NAME`, `step:NAME`."""
        return {
            f"{key}:{name}": value
            for name in self.names
            for key, value in self.adamw.state.get(self.parameters[name], {}).items()
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave; ValueError that names a parameter this optimiser does not have."""
        index = {name: i for i, name in enumerate(self.names)}
        state: dict[int, dict[str, Tensor]] = {}
        for flat, value in tensors.items():
            key, _, name = flat.partition(":")
            if name not in index:
                raise ValueError(f"the optimiser state has {flat!r}, but the model trains no parameter {name!r}")
            state.setdefault(index[name], {})[key] = value
        self.adamw.load_state_dict({"state": state, "param_groups": self.adamw.state_dict()["param_groups"]})
