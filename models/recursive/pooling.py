"""From the states of a decoder to one unit vector a text; used by inference and training alike.

Shapes: B texts of a batch, T padded length, H hidden size, D dimensions kept.

Which positions are real is known from lengths only. Ids are never compared with that of the padding token: it often is
the end token as well (Qwen3-Embedding: <|endoftext|> is both).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..config import check_choice

POOLINGS = ("last", "mean")
PADDINGS = ("right", "left")


def decoder_of(backbone: Any) -> Any:
    """The decoder below the LM head: no logits of the vocabulary are ever computed.

    PEFT wraps layers in place, so an adapter's hooks are kept.
    """
    return (backbone.get_base_model() if hasattr(backbone, "get_base_model") else backbone).base_model


def pad(token_lists: Sequence[Sequence[int]], pad_id: int, padding: str = "right") -> tuple[Tensor, Tensor]:
    """Ids (B, T) filled up with `pad_id` at that side, and lengths (B,); on the CPU.

    Raises:
        ValueError: a list without tokens, or an unknown side.
    """
    check_choice("encoder.padding", padding, PADDINGS)
    lengths = [len(tokens) for tokens in token_lists]
    if 0 in lengths:
        raise ValueError(f"text {lengths.index(0)} has no tokens at all, not even an end token")
    longest = max(lengths, default=0)
    ids_BT = np.full((len(lengths), longest), pad_id, dtype=np.int64)
    for row_T, tokens, length in zip(ids_BT, token_lists, lengths, strict=True):
        row_T[longest - length if padding == "left" else 0 :][:length] = tokens
    return torch.from_numpy(ids_BT), torch.tensor(lengths, dtype=torch.int64)


def real_positions(lengths_B: Tensor, longest: int, padding: str) -> Tensor:
    """Which positions hold a text (B, T), the others being filled up."""
    place_T = torch.arange(longest, device=lengths_B.device)
    return place_T < lengths_B[:, None] if padding == "right" else place_T >= longest - lengths_B[:, None]


def hidden_states(decoder: Any, ids_BT: Tensor, lengths_B: Tensor, padding: str, causal: bool) -> Tensor:
    """The decoder's last states (B, T, H); what stands at padding means nothing.

    Causal attention with padding on the right needs no mask, as no real token sees it: the fastest kernel runs, and a
    row is computed as it would be alone.
    """
    if padding == "right" and causal:
        return decoder(input_ids=ids_BT, use_cache=False).last_hidden_state  # type: ignore[no-any-return]
    mask_BT = real_positions(lengths_B, ids_BT.shape[1], padding)
    place_BT = mask_BT.cumsum(1) - 1
    output = decoder(
        input_ids=ids_BT,
        attention_mask=mask_BT.long(),
        position_ids=place_BT.clamp(min=0),
        use_cache=False,
    )
    return output.last_hidden_state  # type: ignore[no-any-return]


def pool(hidden_BTH: Tensor, lengths_B: Tensor, padding: str, pooling: str) -> Tensor:
    """`last`: the state of each text's last token, its end token; `mean`: the mean over its tokens. Float32 (B, H)."""
    check_choice("encoder.pooling", pooling, POOLINGS)
    T = hidden_BTH.shape[1]
    if pooling == "last":
        last_B = lengths_B - 1 if padding == "right" else torch.full_like(lengths_B, T - 1)
        return hidden_BTH[torch.arange(len(lengths_B), device=last_B.device), last_B].float()
    real_BT = real_positions(lengths_B, T, padding)
    return (hidden_BTH.float() * real_BT[..., None]).sum(1) / lengths_B[:, None]


def finish(pooled_BH: Tensor, dimensions: int | None = None, normalise: bool = True) -> Tensor:
    """The first `dimensions` (None: all) in float32, scaled to length 1 (B, D)."""
    kept_BD = pooled_BH.float()[:, :dimensions]
    return functional.normalize(kept_BD, dim=-1, eps=1e-12) if normalise else kept_BD
