"""The slow way to ask a decision model: one plain forward pass a question."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from retrail.models.config import DecisionConfig, ModelConfig
from retrail.models.decision.build import build_decision
from retrail.models.decision.layout import PackedSlate, SlateLayout
from retrail.models.decision.model import DecisionModel


def build(kind: str = "tiny:llama", attention: str = "sdpa", **decision: object) -> tuple[DecisionModel, SlateLayout]:
    """A tiny model in float32 with a yes/no head, unless `decision` says otherwise."""
    model = ModelConfig(path=kind, attention=attention, dtype="float32")
    return build_decision(model, DecisionConfig(**{"head": "yes_no", **decision}), torch.device("cpu"))


def plain_logits(net: DecisionModel, ids: list[int]) -> Tensor:
    """Logits of every next token of one sequence, by the whole causal LM."""
    return net.backbone(input_ids=torch.tensor([ids])).logits[0]


def row_by_row(net: DecisionModel, packed: Iterable[PackedSlate]) -> Tensor:
    """Log-odds of yes with one plain forward pass a question: trunk and one branch, no mask, no cache."""
    yes, no = net.label_ids
    rows = [plain_logits(net, slate.trunk + branch)[-1] for slate in packed for branch in slate.branches]
    return torch.stack([row[yes] - row[no] for row in rows])


def gradients(net: DecisionModel, values: Tensor) -> dict[str, Tensor]:
    """Gradient of every parameter for a fixed mix of these values."""
    net.zero_grad()
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
