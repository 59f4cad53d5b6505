"""What one reading of a trunk leaves behind, so that branches can be read later without it.

Shapes: S slates of a batch, T longest trunk, C candidates of a slate, L longest row of branch tokens, H hidden size,
G heads of keys and values, D their size, K keys of a slate (`late`: T; `end`: C).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from .layout import PackedSlate

# Trunks are padded to a multiple of this: kernels are prepared once a shape, and there are fewer shapes.
_LENGTH_STEP = 32
# Trunks that were asked for once are remembered by their keys alone, 100 bytes each.
_REMEMBERED_KEYS = 100_000


def padded_length(tokens: int) -> int:
    """How long a trunk of so many tokens is in a batch of its own."""
    return -(-tokens // _LENGTH_STEP) * _LENGTH_STEP


@dataclass(frozen=True, slots=True)
class CandidateKeys:
    """The candidates' side of a pointer head (see `PointerHead`), float32.

    keys_SKH: unit keys, of all trunk tokens (readout `late`) or of the candidates' last ones (`end`).
    mean_SH: the mean state of the trunk (used by `late`).
    level_SC: w . norm(h_end) + b.
    """

    keys_SKH: Tensor
    mean_SH: Tensor
    level_SC: Tensor


@dataclass(frozen=True, slots=True)
class TrunkMemory:
    """One trunk that was read, padded as in a batch of its own: alone it need not be copied to be used.

    layers: keys and values of each layer, two tensors (G, T, D) in the model's dtype.
    last_H: the state of its last token.
    head: for a pointer head, with S = 1.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    last_H: Tensor
    head: CandidateKeys | None = None

    def to(self, device: torch.device | str) -> TrunkMemory:
        """The same on another device."""
        head = self.head
        if head is not None:
            head = CandidateKeys(head.keys_SKH.to(device), head.mean_SH.to(device), head.level_SC.to(device))
        return TrunkMemory(tuple((k.to(device), v.to(device)) for k, v in self.layers), self.last_H.to(device), head)

    @property
    def num_bytes(self) -> int:
        """What its tensors take."""
        head = [] if self.head is None else [self.head.keys_SKH, self.head.mean_SH, self.head.level_SC]
        return sum(t.numel() * t.element_size() for t in (*chain(*self.layers), self.last_H, *head))


def trunk_key(packed: PackedSlate) -> str:
    """Hex sha256 over the trunk's tokens and where its candidates are: what is equal in both has one memory."""
    headings = [place for heading in packed.headings for place in (heading.start, heading.stop)]
    digest = hashlib.sha256()
    for numbers in (packed.trunk, packed.starts, packed.ends, headings):
        digest.update(len(numbers).to_bytes(8, "little"))
        digest.update(array("q", numbers).tobytes())
    return digest.hexdigest()


def cut_trunks(
    cache: Any, hidden_STH: Tensor, head: CandidateKeys | None, slates: Sequence[PackedSlate]
) -> list[TrunkMemory]:
    """The memory of each trunk of a batch that was read.

    cache: a transformers cache that the pass filled.

    Raises:
        ValueError: a layer keeps something else than the keys and values of every token.
    """
    T = hidden_STH.shape[1]
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None or layer.keys.shape[-2] != T or layer.values.shape[-2] != T:
            raise ValueError(
                f"a layer of this model ({type(layer).__name__}) does not keep the keys and values of all {T} tokens, "
                "so that a trunk cannot be stored; search without static slates"
            )
    memories = []
    for s, packed in enumerate(slates):
        size = padded_length(len(packed.trunk))
        # Copies: a view would keep all other trunks of the batch in memory.
        layers = tuple((layer.keys[s, :, :size].clone(), layer.values[s, :, :size].clone()) for layer in cache.layers)
        kept = None
        if head is not None:
            count = size if head.keys_SKH.shape[1] == T else len(packed.ends)
            parts = head.keys_SKH[s, :count], head.mean_SH[s], head.level_SC[s, : len(packed.ends)]
            kept = CandidateKeys(*(part.clone()[None] for part in parts))
        memories.append(TrunkMemory(layers, hidden_STH[s, len(packed.trunk) - 1].clone(), kept))
    return memories


def join_caches(memories: Sequence[TrunkMemory], width: int) -> Any:
    """A transformers cache of these trunks, padded with zeros to `width` tokens; a single one is not copied."""
    from transformers.cache_utils import Cache, DynamicLayer

    layers: list[Any] = []
    for parts in zip(*(memory.layers for memory in memories), strict=True):
        keys, values = (_stacked([part[n] for part in parts], 1, width) for n in range(2))
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        layers.append(layer)
    return Cache(layers=layers)


def join_heads(memories: Sequence[TrunkMemory]) -> CandidateKeys:
    """The candidates' side of several trunks as one batch, padded with zeros."""
    heads = [memory.head for memory in memories if memory.head is not None]
    K, C = (max(getattr(head, name).shape[1] for head in heads) for name in ("keys_SKH", "level_SC"))
    return CandidateKeys(
        _stacked([head.keys_SKH[0] for head in heads], 0, K),
        torch.cat([head.mean_SH for head in heads]),
        _stacked([head.level_SC[0] for head in heads], 0, C),
    )


def _stacked(parts: Sequence[Tensor], dim: int, width: int) -> Tensor:
    """Tensors as rows of one, each filled up with zeros at the end of `dim`; one that needs none stays where it is."""
    filled = [
        part
        if part.shape[dim] == width
        else functional.pad(part, [0, 0] * (part.dim() - 1 - dim) + [0, width - part.shape[dim]])
        for part in parts
    ]
    return filled[0][None] if len(filled) == 1 else torch.stack(filled)


class TrunkCache:
    """Memories of the trunks that were used last, at most `max_bytes` of them.

    A trunk is kept from the second time on that it is asked for: most are shown to one query only, and would drive out
    those that come back.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, TrunkMemory] = OrderedDict()
        self._seen: OrderedDict[str, None] = OrderedDict()

    def get(self, key: str) -> TrunkMemory | None:
        """The memory of that trunk, if it is kept."""
        memory = self._kept.get(key)
        if memory is not None:
            self._kept.move_to_end(key)
        return memory

    def returns(self, key: str) -> bool:
        """Whether this trunk was asked about before; from now on it was."""
        known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _REMEMBERED_KEYS:
            self._seen.popitem(last=False)
        return known

    def put(self, key: str, memory: TrunkMemory) -> None:
        """Keep this memory, and let go of those that were not used for longest; one that is too large is not kept."""
        if key in self._kept or memory.num_bytes > self.max_bytes:
            return
        self._kept[key] = memory
        self.num_bytes += memory.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes
