"""Put a decision model together: backbone, layout, head; the same for training, untrained controls and export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ..backbone import add_adapter, load_backbone
from ..config import AdapterConfig, DecisionConfig, ModelConfig
from ..prompts import decision_prompt, prompt_hash
from ..tokenizer import SafeTokenizer
from .layout import SlateLayout
from .model import DecisionModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def build_decision(
    model: ModelConfig, decision: DecisionConfig, device: torch.device, adapter: AdapterConfig | None = None
) -> tuple[DecisionModel, SlateLayout]:
    """The network on `device` and the layout that feeds it; with `adapter`, what it trains requires gradients.

    A pointer head starts untrained (see `PointerHead`) and always trains.
    """
    backbone, tokenizer = load_backbone(model, device)
    layout = SlateLayout(SafeTokenizer(tokenizer), decision)
    if adapter is None:
        backbone.requires_grad_(False)
    else:
        backbone = add_adapter(backbone, adapter)
    lm_head = backbone.get_output_embeddings()
    if layout.label_ids is None and lm_head.weight is not backbone.get_input_embeddings().weight:
        # A pointer head never reads it: several ranks would wait for its gradient in vain.
        lm_head.requires_grad_(False)
    return wrap_decision(backbone, layout), layout


def wrap_decision(backbone: PreTrainedModel, layout: SlateLayout) -> DecisionModel:
    """The decision network of a loaded backbone, on its device."""
    attention = "packed" if backbone.config._attn_implementation == "flex_attention" else "two_pass"
    network = DecisionModel(backbone, layout.label_ids, attention, layout.config.readout)
    return network.to(network.device)


def open_layout(tokenizer: PreTrainedTokenizerBase, decision: DecisionConfig) -> SlateLayout:
    """The layout of a loaded tokenizer."""
    return SlateLayout(SafeTokenizer(tokenizer), decision)


def contract(layout: SlateLayout) -> dict[str, object]:
    """What training and inference must agree on; stored in checkpoints and exports, compared when they are loaded."""
    prompt = decision_prompt(layout.config.instruction)
    return {
        "decision": asdict(layout.config),
        "prompt": {"name": layout.config.instruction, "version": prompt.version, "sha256": prompt_hash(prompt)},
        "tokenizer_sha256": layout.tokenizer.fingerprint,
        "label_ids": list(layout.label_ids) if layout.label_ids else None,
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables inside tables as one, their keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
