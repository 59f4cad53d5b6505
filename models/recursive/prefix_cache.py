"""States of one query begin alike: what they share is read once, over a whole search.

Each owner (a query) has a tree of the tokens that were read for it, with their keys and values. A new list of tokens
takes those of its longest beginning in that tree, whoever read it (its parent state, a sibling, a view), and only the
rest is computed. Beginnings are compared as tokens, never as texts: punctuation before a new line is another token than
at an end. Lists that leave the tree at the same place share a row of the forward pass, in which they are a tree again.

Shapes: R rows of a pass, P tokens before (from the cache), L new tokens, Y layers, G heads of keys and values, E their
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..prefix_tree import PrefixTree
from ..tree_attention import in_kernel_form, may_see
from .pooling import decoder_of

_BYTES = 2 * 2**30
_TOKENS = {"cpu": 4_096, "cuda": 65_536}


@dataclass(slots=True)
class _Memory:
    """What was read for one owner.

    children: (place of a token, next token) -> its place; -1 stands before the first. keys: keys and values
    (Y, 2, G, capacity, E), of which `count` places are filled. vectors: the last state of lists that ended at a place.
    """

    children: dict[tuple[int, int], int] = field(default_factory=dict)
    kept: Tensor | None = None
    count: int = 0
    vectors: dict[int, np.ndarray] = field(default_factory=dict)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Places of the longest beginning that was read."""
        path: list[int] = []
        place = -1
        for token in tokens:
            place = self.children.get((place, token), -2)
            if place == -2:
                break
            path.append(place)
        return path


@dataclass(frozen=True, slots=True)
class _Row:
    """Lists of one owner that leave its tree at the same place: `path`, then the rests of the lists `members`."""

    owner: int
    path: tuple[int, ...]
    members: tuple[int, ...]
    tree: PrefixTree


def unsupported(backbone: Any) -> str | None:
    """Why keys and values of this model cannot be reused; None where they can."""
    config = decoder_of(backbone).config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers without full attention ({', '.join(sorted(kinds))})"
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        return "it attends to a window only (sliding_window)"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {config._attn_implementation}, which takes no mask of this kind"
    return None


class PrefixSession:
    """Encodes lists of tokens for one search.

    Attributes:
        max_bytes_per_owner: of keys and values that are kept for a query; what no longer fits is computed again, with
            the same result. A token takes 2 x layers x heads x size numbers (SmolLM2-135M: 46 kB in float32).
        max_tokens: of a forward pass, cached ones and padding included.
    """

    def __init__(self, backbone: Any, *, max_bytes_per_owner: int = _BYTES, max_tokens: int | None = None) -> None:
        """Raises ValueError where the model does not allow it (`unsupported`)."""
        if reason := unsupported(backbone):
            raise ValueError(f"this model allows no prefix cache: {reason}")
        self.backbone, self.max_bytes_per_owner = backbone, max_bytes_per_owner
        embedding: Any = backbone.get_input_embeddings()
        self.device: torch.device = embedding.weight.device
        self.max_tokens = max_tokens or _TOKENS.get(self.device.type, _TOKENS["cpu"])
        self._memories: dict[int, _Memory] = {}

    def encode(
        self, token_lists: Sequence[Sequence[int]], owners: Sequence[int]
    ) -> tuple[np.ndarray, list[int], list[int]]:
        """The state of each list's last token, float32 (S, H); how many of its tokens were computed, and reused.

        What several lists begin with is computed, and counted, with the first of them.

        Raises:
            ValueError: a list without tokens.
        """
        if any(len(tokens) == 0 for tokens in token_lists):
            raise ValueError("a state has no tokens at all, not even an end token")
        found: list[np.ndarray | None] = [None] * len(token_lists)
        computed = [0] * len(token_lists)
        rows = self._rows(token_lists, owners, found)
        for batch in _batches(rows, self.max_tokens):
            self._read(batch, token_lists, found, computed)
        reused = [len(tokens) - own for tokens, own in zip(token_lists, computed, strict=True)]
        hidden = int(decoder_of(self.backbone).config.get_text_config().hidden_size)
        vectors = np.stack([v for v in found if v is not None]) if found else np.zeros((0, hidden), np.float32)
        return vectors, computed, reused

    def forget(self, owner: int) -> None:
        """Free what was read for an owner."""
        self._memories.pop(owner, None)

    def _rows(
        self, token_lists: Sequence[Sequence[int]], owners: Sequence[int], found: list[np.ndarray | None]
    ) -> list[_Row]:
        """What has to be computed; lists whose vector is known get it at once."""
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for n, (tokens, owner) in enumerate(zip(token_lists, owners, strict=True)):
            memory = self._memories.setdefault(owner, _Memory())
            path = memory.find(tokens)
            if len(path) == len(tokens):
                if path[-1] in memory.vectors:
                    found[n] = memory.vectors[path[-1]]
                    continue
                path = path[:-1]  # its last token was read inside another list: its state is not known
            groups.setdefault((owner, tuple(path)), []).append(n)
        return [
            _Row(owner, path, tuple(members), PrefixTree([list(token_lists[n])[len(path) :] for n in members]))
            for (owner, path), members in groups.items()
        ]

    def _read(
        self,
        rows: Sequence[_Row],
        token_lists: Sequence[Sequence[int]],
        found: list[np.ndarray | None],
        computed: list[int],
    ) -> None:
        P = max(len(row.path) for row in rows)
        L = max(len(row.tree.ids) for row in rows)
        ids_RL, depth_RL = torch.zeros((len(rows), L), dtype=torch.long), torch.zeros((len(rows), L), dtype=torch.long)
        until_RL = torch.full((len(rows), L), -1, dtype=torch.long)
        before_RP = torch.zeros((len(rows), P), dtype=torch.bool)
        for r, row in enumerate(rows):
            size = len(row.tree.ids)
            ids_RL[r, :size] = torch.tensor(row.tree.ids)
            depth_RL[r, :size] = torch.tensor(row.tree.depths) + len(row.path)
            until_RL[r, :size] = torch.tensor(row.tree.until)
            before_RP[r, : len(row.path)] = True
        place_L = torch.arange(L)
        new_RLL = may_see(place_L[:, None], place_L, until_RL[:, None])
        allowed = torch.cat([before_RP[:, None].expand(-1, L, -1), new_RLL], dim=2)[:, None]
        out = decoder_of(self.backbone)(
            input_ids=ids_RL.to(self.device),
            position_ids=depth_RL.to(self.device),
            attention_mask=in_kernel_form(self.backbone, allowed.to(self.device)),
            cache=self._cache(rows, P),
            use_cache=True,
        )
        for r, row in enumerate(rows):
            ends = [row.tree.paths[i][-1] for i in range(len(row.members))]
            states = out.last_hidden_state[r, ends].float().cpu().numpy()
            places = self._remember(row, out.cache, r, P)
            seen: set[int] = set()
            for n, path, state in zip(row.members, row.tree.paths, states, strict=True):
                found[n] = state
                computed[n] = len(set(path) - seen)
                seen.update(path)
                if places is not None:
                    self._memories[row.owner].vectors[places[path[-1]]] = state

    def _cache(self, rows: Sequence[_Row], width: int) -> Any:
        """A transformers cache of the rows' paths, padded with zeros at the end."""
        from transformers.cache_utils import Cache, DynamicLayer

        if width == 0:
            return None
        parts: list[Tensor | None] = []
        for row in rows:
            kept = self._memories[row.owner].kept
            path = torch.tensor(row.path, dtype=torch.long, device=self.device)
            parts.append(None if kept is None else kept[:, :, :, path])
        like = next(part for part in parts if part is not None)
        Y, _, G, _, E = like.shape
        together = like.new_zeros((len(rows), Y, 2, G, width, E))
        for r, part in enumerate(parts):
            if part is not None:
                together[r, :, :, :, : part.shape[3]] = part
        layers: list[Any] = []
        for y in range(Y):
            layer = DynamicLayer()
            keys, values = together[:, y, 0], together[:, y, 1]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            layers.append(layer)
        return Cache(layers=layers)

    def _remember(self, row: _Row, cache: Any, r: int, width: int) -> list[int] | None:
        """Keep the keys and values of a row's new tokens; their places, or None where memory ends."""
        memory, size = self._memories[row.owner], len(row.tree.ids)
        new = torch.stack(
            [
                torch.stack([layer.keys[r, :, width : width + size], layer.values[r, :, width : width + size]])
                for layer in cache.layers
            ]
        )
        per_token = new.numel() // max(1, size) * new.element_size()
        if (memory.count + size) * per_token > self.max_bytes_per_owner:
            return None
        if memory.kept is None or memory.kept.shape[3] < memory.count + size:
            Y, _, G, _, E = new.shape
            room = new.new_empty((Y, 2, G, max(memory.count + size, 2 * memory.count), E))
            if memory.kept is not None:
                room[:, :, :, : memory.count] = memory.kept[:, :, :, : memory.count]
            memory.kept = room
        memory.kept[:, :, :, memory.count : memory.count + size] = new
        first, last = memory.count, row.path[-1] if row.path else -1
        places: list[int] = []
        for i, (token, before) in enumerate(zip(row.tree.ids, row.tree.before, strict=True)):
            parent = last if before < 0 else places[before]
            # A token that is there already was computed again for its state alone; it keeps its first place.
            places.append(memory.children.setdefault((parent, token), first + i))
        memory.count += size
        return places


def _batches(rows: Sequence[_Row], max_tokens: int) -> list[list[_Row]]:
    """Rows of similar size together, within a budget of tokens, padding and cached ones included."""
    batches: list[list[_Row]] = []
    size = (0, 0)
    for row in sorted(rows, key=lambda row: (len(row.tree.ids), len(row.path)), reverse=True):
        grown = max(size[0], len(row.tree.ids)), max(size[1], len(row.path))
        if batches and (len(batches[-1]) + 1) * sum(grown) <= max_tokens:
            batches[-1].append(row)
            size = grown
        else:
            batches.append([row])
            size = len(row.tree.ids), len(row.path)
    return batches
