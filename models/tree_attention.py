"""Attention over token lists that share beginnings, in one row: each token sees its own path and nothing beside it.

Shapes: S rows, N tokens of a row in depth-first order (`PrefixTree`), padding included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tree_mask(backbone: Any, until_SN: Tensor, start: int = 0) -> Any:
    """Who sees whom, for the tokens from `start` on as readers, in the form that the model's attention kernel takes.

    until_SN: the last place of each token's subtree; -1 for padding, which sees itself, lest a row be empty.
    """
    kind = backbone.config._attn_implementation
    if kind == "flex_attention":
        return _block_mask(until_SN, start)
    place_N = torch.arange(until_SN.shape[1], device=until_SN.device)
    return in_kernel_form(backbone, may_see(place_N[start:, None], place_N, until_SN[:, None])[:, None])


def in_kernel_form(backbone: Any, allowed: Tensor) -> Tensor:
    """A mask of who may see whom (S, 1, readers, read), as the `sdpa` or `eager` attention of the model takes it."""
    if backbone.config._attn_implementation != "eager":
        return allowed
    dtype = backbone.dtype
    low = torch.finfo(dtype).min
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, low)


def may_see(place_q: Tensor, place_k: Tensor, until_k: Tensor) -> Tensor:
    """In depth-first order those who descend from a token are the places behind it, up to the end of its subtree."""
    return ((place_k <= place_q) & (place_q <= until_k)) | (place_k == place_q)


def _block_mask(until_SN: Tensor, start: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return may_see(q + start, k, until_SN[b, k])

    S, N = until_SN.shape
    return create_block_mask(allowed, S, None, N - start, N, device=str(until_SN.device))
