"""The state encoder as a network to train: all states of a chain in one row, documents beside them.

The states of one chain begin alike (head, first documents ...), so their token lists are laid out as a tree of common
beginnings: what they share is computed once, and each ends in its own end token. It is the tokens that are compared,
not the texts: punctuation before a new line is another token than at an end.

Shapes: C rows (chains), L longest tree, S states, M documents, T longest document, H hidden size, D kept of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ..prefix_tree import PrefixTree
from ..tree_attention import tree_mask
from .pooling import decoder_of, finish, pad

if TYPE_CHECKING:
    from .encoder import LocalEncoder


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Token trees of chains, and documents; both padded on the right.

    tree_CL, depth_CL, until_CL: ids, positions and ends of subtrees (-1: padding).
    state_row_S, state_place_S: where the end token of each state is.
    docs_MT, doc_len_M: ids and lengths of the documents.
    num_tokens: tokens that are computed, without padding.
    """

    tree_CL: Tensor
    depth_CL: Tensor
    until_CL: Tensor
    state_row_S: Tensor
    state_place_S: Tensor
    docs_MT: Tensor
    doc_len_M: Tensor
    num_tokens: int

    @classmethod
    def of(cls, chains: Sequence[Sequence[Sequence[int]]], documents: Sequence[Sequence[int]]) -> StateBatch:
        """chains: for each row the id lists of its states, in the order in which their vectors come back."""
        trees = [PrefixTree(states) for states in chains]
        docs_MT, doc_len_M = pad(documents, 0) if documents else (torch.zeros((0, 1), dtype=torch.long), torch.zeros(0))
        places = [(c, path[-1]) for c, tree in enumerate(trees) for path in tree.paths]
        place = torch.tensor(places, dtype=torch.long).reshape(-1, 2)
        return cls(
            tree_CL=_rows([tree.ids for tree in trees], 0),
            depth_CL=_rows([tree.depths for tree in trees], 0),
            until_CL=_rows([tree.until for tree in trees], -1),
            state_row_S=place[:, 0],
            state_place_S=place[:, 1],
            docs_MT=docs_MT,
            doc_len_M=doc_len_M.long(),
            num_tokens=sum(len(tree.ids) for tree in trees) + sum(map(len, documents)),
        )

    def to(self, device: torch.device | str) -> StateBatch:
        """The same batch on another device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "num_tokens"}
        return StateBatch(**moved, num_tokens=self.num_tokens)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.tree_CL.numel() + self.docs_MT.numel()


class StateModel(nn.Module):
    """Unit vectors of states and documents: the state of their end token, scaled to length 1, float32."""

    def __init__(self, encoder: LocalEncoder) -> None:
        """The network of an encoder, whose vectors it gives; LoRA may be on it.

        Raises:
            ValueError: the encoder makes vectors from more than the state of the end token, or does not scale them.
        """
        super().__init__()
        config = encoder.config
        for key, value, wanted in (
            ("encoder.pooling", config.pooling, "last"),
            ("encoder.normalise", config.normalise, True),
        ):
            if value != wanted:
                raise ValueError(
                    f"{key}={value} cannot be trained: vectors of training are unit end states; set it to {wanted}"
                )
        if not encoder.causal:
            raise ValueError(
                f"model.path={encoder.source} attends in both directions, so that states of one chain cannot share a "
                "row; train a causal model"
            )
        self.backbone, self.dimensions = encoder.backbone, config.dimensions

    def forward(self, batch: StateBatch) -> tuple[Tensor, Tensor]:
        """(states (S, D), documents (M, D)), D the encoder's `dimensions`, or H."""
        decoder = decoder_of(self.backbone)
        tree_CLH = decoder(
            input_ids=batch.tree_CL,
            position_ids=batch.depth_CL,
            attention_mask=tree_mask(self.backbone, batch.until_CL),
            use_cache=False,
        ).last_hidden_state
        states_SD = finish(tree_CLH[batch.state_row_S, batch.state_place_S], self.dimensions)
        if len(batch.docs_MT) == 0:
            return states_SD, states_SD.new_zeros((0, states_SD.shape[1]))
        # Padding stands on the right and attention is causal: no real token sees it.
        docs_MTH = decoder(input_ids=batch.docs_MT, use_cache=False).last_hidden_state
        last = docs_MTH[torch.arange(len(batch.doc_len_M), device=docs_MTH.device), batch.doc_len_M - 1]
        return states_SD, finish(last, self.dimensions)


def _rows(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    table = np.full((len(rows), max(map(len, rows), default=1)), fill, dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(table)
