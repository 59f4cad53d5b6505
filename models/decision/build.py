"""Put a decision model together: backbone, layout, head; the same for training, untrained controls and export."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..backbone import add_adapter, load_backbone
from ..config import AdapterConfig, DecisionConfig, ModelConfig
from ..prompts import NONE_PROMPT, decision_prompt, prompt_hash
from ..tokenizer import SafeTokenizer
from .head import PointerHead
from .layout import SlateLayout
from .model import DecisionModel

HEAD = "pointer_head.safetensors"
"""File of an exported folder that holds the pointer head."""

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def build_decision(
    model: ModelConfig,
    decision: DecisionConfig,
    device: torch.device,
    adapter: AdapterConfig | None = None,
    *,
    to_merge: bool = False,
) -> tuple[DecisionModel, SlateLayout]:
    """The network on `device` and the layout that feeds it; with `adapter`, what it trains requires gradients.

    A pointer head starts as that of the folder `model.path`, where it is an export with one, else untrained (see
    `PointerHead`), and always trains. With `to_merge` the 4-bit weights that a QLoRA adapter was trained on are
    there as plain weights of the same values, into which it can be merged.

    Raises:
        ValueError: the exported head is damaged, or of another readout; else as `load_backbone` and `add_adapter`.
    """
    four_bit = adapter is not None and adapter.kind == "qlora"
    backbone, tokenizer = load_backbone(model, device, four_bit=four_bit)
    if adapter is not None and four_bit and to_merge:
        backbone, adapter = backbone.dequantize(), replace(adapter, kind="lora")
    network, layout = assemble(backbone, tokenizer, decision, adapter)
    start = Path(model.path).expanduser() / HEAD
    if network.head is not None and start.is_file():
        load_head(network.head, start)
    return network, layout


def assemble(
    backbone: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    decision: DecisionConfig,
    adapter: AdapterConfig | None = None,
) -> tuple[DecisionModel, SlateLayout]:
    """The network of a loaded (or empty) backbone, with the weights set to train that training trains."""
    layout = open_layout(tokenizer, decision, backbone)
    if adapter is None:
        backbone.requires_grad_(False)
    else:
        backbone = add_adapter(backbone, adapter)
    lm_head = backbone.get_output_embeddings()
    if layout.label_ids is None and lm_head.weight is not backbone.get_input_embeddings().weight:
        # A pointer head never reads it: several ranks would wait for its gradient in vain.
        lm_head.requires_grad_(False)
    return wrap_decision(backbone, layout), layout


def load_head(head: PointerHead, file: Path) -> None:
    """Give `head` the weights of a file.

    Raises:
        ValueError: damaged, or of another head; names the file.
    """
    try:
        head.load_state_dict(load_file(file))
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{file}: not the pointer head of this model with decision.readout={head.readout} ({error}); set the "
            "readout that it was trained with, or export the run again"
        ) from error


def wrap_decision(backbone: PreTrainedModel, layout: SlateLayout) -> DecisionModel:
    """The decision network of a loaded backbone, on its device.

    Raises:
        ValueError: the layout was opened without the backbone, and fills slates that are longer than its context.
    """
    context = context_length(backbone)
    if context is not None and layout.max_slate_tokens > context:
        raise ValueError(
            f"slates of decision.max_slate_tokens={layout.max_slate_tokens} tokens are longer than the context of the "
            f"model (max_position_embeddings={context}): open the layout with the backbone, which caps them, or lower "
            "decision.max_slate_tokens"
        )
    attention = "packed" if backbone.config._attn_implementation == "flex_attention" else "two_pass"
    network = DecisionModel(backbone, layout.label_ids, attention, layout.config.readout)
    return network.to(network.device)


def open_layout(
    tokenizer: PreTrainedTokenizerBase, decision: DecisionConfig, backbone: PreTrainedModel | None = None
) -> SlateLayout:
    """The layout of a loaded tokenizer, whose slates fit the context of `backbone` (None: of any model)."""
    return SlateLayout(SafeTokenizer(tokenizer), decision, None if backbone is None else context_length(backbone))


def context_length(backbone: PreTrainedModel) -> int | None:
    """Positions that the model was made for (None: its configuration does not say)."""
    return getattr(backbone.config.get_text_config(), "max_position_embeddings", None)


def contract(layout: SlateLayout) -> dict[str, object]:
    """What training and inference must agree on; stored in checkpoints and exports, compared when they are loaded."""
    prompt = decision_prompt(layout.config.instruction)
    words: dict[str, object] = {
        "name": layout.config.instruction,
        "version": prompt.version,
        "sha256": prompt_hash(prompt),
    }
    if layout.config.head == "yes_no":  # a pointer head never shows them
        words["none"] = {"version": NONE_PROMPT.version, "sha256": prompt_hash(NONE_PROMPT)}
    return {
        "decision": asdict(layout.config),
        "prompt": words,
        "tokenizer_sha256": layout.tokenizer.fingerprint,
        "label_ids": list(layout.label_ids) if layout.label_ids else None,
    }
