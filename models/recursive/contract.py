"""What a vector depends on, as plain JSON: kept beside vectors and checkpoints, compared before they are used again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Keys that say where something came from; the same model may lie in another folder.
INFORMATIVE = ("source",)
# What the vectors of documents depend on; the rest concerns states, so that an index serves other prompts as well.
DOCUMENT_KEYS = (
    "format",
    "kind",
    "dtype",
    "dim",
    "pooling",
    "normalise",
    "begin_tokens",
    "end_token",
    "tokenizer",
    "max_document_tokens",
    "document_prompt",
    "modules",
    "weights",
)
_SAMPLED = 4096
_NOTHING = object()


def document_part(contract: Mapping[str, Any]) -> dict[str, Any]:
    """What of a contract the vectors of documents depend on."""
    return {key: value for key, value in contract.items() if key in DOCUMENT_KEYS}


def check_contract(stored: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Refuse vectors or checkpoints of another contract.

    Args:
        stored: the contract that was kept, for instance by an index (`document_part`).
        now: the contract of the encoder at hand.
        where: whose contract `stored` is, such as `index runs/a/index`; begins the message.

    Raises:
        ValueError: they differ; names the first key that does, and both values.
    """
    then, current = dict(_flat(stored)), dict(_flat(now))
    for key in (*then, *(key for key in current if key not in then)):
        before, after = then.get(key, _NOTHING), current.get(key, _NOTHING)
        if before != after:
            raise ValueError(
                f"{where} was made with {key}={_shown(before)}, but the encoder has {key}={_shown(after)}: vectors of "
                "the two do not compare; use the encoder that it was made with, or make it again with this one"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if not prefix and key in INFORMATIVE:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            # As JSON has it, where a tuple becomes a list.
            yield f"{prefix}{key}", json.loads(json.dumps(value))


def _shown(value: object) -> str:
    return "(not there)" if value is _NOTHING else json.dumps(value, ensure_ascii=False)


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
