"""What a vector depends on, as plain JSON: kept beside vectors and checkpoints, compared before they are used again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# What the vectors of states alone depend on, and where a model lies: an index serves other prompts and folders as well.
NOT_OF_DOCUMENTS = ("source", "max_state_tokens", "query_cut", "renderer", "prompts_sha256", "prompts")
_SAMPLED = 4096


def document_part(contract: Mapping[str, Any]) -> dict[str, Any]:
    """What of an encoder's contract the vectors of documents depend on, as it looks after a file."""
    kept = {key: value for key, value in contract.items() if key not in NOT_OF_DOCUMENTS}
    stored: dict[str, Any] = json.loads(json.dumps(kept))
    return stored


def weights_fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Hex sha256 over name, shape, type and up to 4,096 evenly spaced values of every parameter.

    It is meant to tell models and training steps apart in milliseconds, whatever their size, on any device; a change of
    a few chosen values between the samples is not seen.
    """
    digest = hashlib.sha256()
    for name, parameter in parameters:
        values = parameter.detach().reshape(-1)
        digest.update(f"\n{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        if values.numel():
            step = max(1, values.numel() // _SAMPLED)
            sample: Any = values[::step][:_SAMPLED].cpu().contiguous().view(torch.uint8).numpy()
            digest.update(sample.tobytes())
    return digest.hexdigest()
