"""The decision network: a causal language model read at a few positions of a packed slate.

Shapes: S slates of a batch, T longest trunk, C candidates, Q questions of all slates together, L longest row of
branch tokens, H hidden size, V vocabulary.

The branch readout touches two rows of the LM head at Q positions and never builds a (tokens x V) matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .layout import PackedSlate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PointerHead(nn.Module):
    """Trained readout without branches: a decide token is compared with each candidate's end token.

    logit_c = scale * cos(Q h_decide, K h_end_c) + w . norm(h_end_c) + b; P(yes) = sigmoid(logit). Q and K start as the
    identity, w at zero, so that the untrained head ranks by similarity of the two contextual states. Kept in float32.
    """

    def __init__(self, hidden_size: int, scale: float = 10.0) -> None:
        """Start from the identity."""
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.relevance = nn.Linear(hidden_size, 1)
        self.log_scale = nn.Parameter(torch.tensor(scale).log())
        with torch.no_grad():
            self.query.weight.copy_(torch.eye(hidden_size))
            self.key.weight.copy_(torch.eye(hidden_size))
            self.relevance.weight.zero_()
            self.relevance.bias.zero_()

    def forward(self, decide_QH: Tensor, ends_QH: Tensor) -> Tensor:
        """Log-odds of yes (Q,) from the decide state of each candidate's slate and its own end state."""
        decide_QH, ends_QH = decide_QH.float(), ends_QH.float()
        similarity = functional.cosine_similarity(self.query(decide_QH), self.key(ends_QH), dim=-1)
        level = self.relevance(functional.layer_norm(ends_QH, ends_QH.shape[-1:])).squeeze(-1)
        return self.log_scale.exp() * similarity + level


@dataclass(frozen=True, slots=True)
class SlateBatch:
    """Several packed slates as tensors, trunks padded on the right.

    trunk_ST, trunk_len_S; ends: (slate, position) of every candidate; branches flattened a slate, padded on the right:
    branch_SL, branch_pos_SL, owner_SL (question number in its slate, -1 padding); reads: (slate, position in the branch row).
    """

    slates: tuple[PackedSlate, ...]
    trunk_ST: Tensor
    trunk_len_S: Tensor
    end_slate_Q: Tensor
    end_pos_Q: Tensor
    branch_SL: Tensor
    branch_pos_SL: Tensor
    owner_SL: Tensor
    read_slate_Q: Tensor
    read_pos_Q: Tensor

    @classmethod
    def of(cls, slates: Sequence[PackedSlate], device: torch.device | str = "cpu") -> SlateBatch:
        """Tensors of these slates on `device`."""
        S = len(slates)
        T = max(len(s.trunk) for s in slates)
        L = max(sum(map(len, s.branches)) for s in slates)
        trunk, branch = torch.zeros(S, T, dtype=torch.long), torch.zeros(S, L, dtype=torch.long)
        position, owner = torch.zeros(S, L, dtype=torch.long), torch.full((S, L), -1, dtype=torch.long)
        ends: list[tuple[int, int]] = []
        reads: list[tuple[int, int]] = []
        for s, slate in enumerate(slates):
            trunk[s, : len(slate.trunk)] = torch.tensor(slate.trunk)
            ends += [(s, end) for end in slate.ends]
            start = 0
            for question, ids in enumerate(slate.branches):
                stop = start + len(ids)
                branch[s, start:stop] = torch.tensor(ids)
                position[s, start:stop] = torch.arange(len(ids)) + len(slate.trunk)
                owner[s, start:stop] = question
                reads.append((s, stop - 1))
                start = stop
        end = torch.tensor(ends, dtype=torch.long).reshape(-1, 2)
        read = torch.tensor(reads, dtype=torch.long).reshape(-1, 2)
        lengths = torch.tensor([len(s.trunk) for s in slates])
        tensors = (trunk, lengths, end[:, 0], end[:, 1], branch, position, owner, read[:, 0], read[:, 1])
        return cls(tuple(slates), *(t.to(device) for t in tensors))

    @property
    def num_tokens(self) -> int:
        """Tokens that carry meaning."""
        return sum(slate.num_tokens for slate in self.slates)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.trunk_ST.numel() + self.branch_SL.numel()


class DecisionModel(nn.Module):
    """A causal LM and, for `head=pointer`, a `PointerHead`.

    `yes_logits` are the log-odds of yes for every question of the batch, slate after slate.
    """

    def __init__(self, backbone: PreTrainedModel, label_ids: tuple[int, int] | None, attention: str = "two_pass") -> None:
        """`label_ids` = (yes, no) for a yes/no head, None for a pointer head.

        attention: `two_pass` (trunk, then all branches against its keys and values), or `packed`
            (one pass under a block mask; a FlexAttention `BlockMask` where the backbone uses it).
        """
        super().__init__()
        self.backbone = backbone
        self.label_ids = label_ids
        self.attention = attention
        self.head = PointerHead(backbone.config.hidden_size) if label_ids is None else None
        if label_ids is not None and getattr(backbone.config, "final_logit_softcapping", None):
            raise ValueError("this model caps its logits; the yes/no readout of two rows would not see the cap")

    @property
    def device(self) -> torch.device:
        """Where the embedding lives."""
        return self.backbone.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    def forward(self, batch: SlateBatch, choices: SlateBatch | None = None) -> tuple[Tensor, Tensor | None]:
        """What training needs in one call: log-odds of yes (Q,), and the logits of `choices` where given."""
        return self.yes_logits(batch), None if choices is None else self.choice_logits(choices)

    def yes_logits(self, batch: SlateBatch) -> Tensor:
        """Log-odds of yes (Q,), float32."""
        if self.head is None:
            return self.log_odds(self.branch_states(batch)[1])
        hidden_STH = self._trunk(batch.trunk_ST)
        decide_SH = hidden_STH[torch.arange(len(batch.slates), device=hidden_STH.device), batch.trunk_len_S - 1]
        ends_QH = hidden_STH[batch.end_slate_Q, batch.end_pos_Q]
        return self.head(decide_SH[batch.end_slate_Q], ends_QH)  # type: ignore[no-any-return]

    def branch_states(self, batch: SlateBatch) -> tuple[Tensor, Tensor]:
        """Hidden states of all branch tokens (S, L, H) and of each branch's last token (Q, H)."""
        states = self._packed(batch) if self.attention == "packed" else self._two_pass(batch)
        return states, states[batch.read_slate_Q, batch.read_pos_Q]

    def log_odds(self, states_QH: Tensor) -> Tensor:
        """logit(yes) - logit(no) (Q,) from two rows of the LM head, float32."""
        assert self.label_ids is not None
        lm_head = self.backbone.get_output_embeddings()
        rows_2H = lm_head.weight[list(self.label_ids)]
        logits_Q2 = functional.linear(states_QH.float(), rows_2H.float())
        if getattr(lm_head, "bias", None) is not None:
            logits_Q2 = logits_Q2 + lm_head.bias[list(self.label_ids)].float()
        return logits_Q2[:, 0] - logits_Q2[:, 1]

    def label_mass(self, states_QH: Tensor, chunk: int = 64) -> Tensor:
        """P(yes) + P(no) among all next tokens (Q,), `chunk` questions at a time (memory: chunk x V)."""
        assert self.label_ids is not None
        parts = []
        for part in states_QH.split(chunk):
            logits_QV = self.backbone.get_output_embeddings()(part).float()
            parts.append((logits_QV[:, list(self.label_ids)].logsumexp(-1) - logits_QV.logsumexp(-1)).exp())
        return torch.cat(parts)

    def choice_logits(self, batch: SlateBatch) -> Tensor:
        """Logits (Q,) whose softmax inside a slate is the answer to its multiple-choice question.

        Yes/no head: log-probability of each option's label tokens after the trunk. Pointer head: its log-odds.
        """
        if self.head is not None:
            return self.yes_logits(batch)
        cache, trunk_STH = self._cached_trunk(batch)
        branch_SLH = self._branches(batch, cache)
        last_SH = trunk_STH[torch.arange(len(batch.slates), device=trunk_STH.device), batch.trunk_len_S - 1]
        first_SLH = torch.cat([last_SH[:, None], branch_SLH[:, :-1]], dim=1)
        starts_SL = (batch.branch_pos_SL == batch.trunk_len_S[:, None]) & (batch.owner_SL >= 0)
        before_SLH = torch.where(starts_SL[..., None], last_SH[:, None], first_SLH)
        valid_SL = batch.owner_SL >= 0
        logits = self.backbone.get_output_embeddings()(before_SLH[valid_SL]).float()
        logp = logits.log_softmax(-1).gather(-1, batch.branch_SL[valid_SL][:, None]).squeeze(-1)
        counts = torch.tensor([len(s.branches) for s in batch.slates], device=logp.device)
        offset_S = torch.cumsum(counts, 0) - counts
        slate_SL = torch.arange(len(batch.slates), device=logp.device)[:, None].expand_as(batch.owner_SL)
        question = offset_S[slate_SL[valid_SL]] + batch.owner_SL[valid_SL]
        return torch.zeros(int(counts.sum()), device=logp.device).index_add(0, question, logp)

    def _trunk(self, trunk_ST: Tensor) -> Tensor:
        # Padding stands on the right and attention is causal: no real token sees it, so no mask is needed and the
        # fastest kernel runs.
        return self._inner()(input_ids=trunk_ST, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _cached_trunk(self, batch: SlateBatch) -> tuple[Any, Tensor]:
        out = self._inner()(input_ids=batch.trunk_ST, use_cache=True)
        return out.cache, out.last_hidden_state

    def _two_pass(self, batch: SlateBatch) -> Tensor:
        return self._branches(batch, self._cached_trunk(batch)[0])

    def _branches(self, batch: SlateBatch, cache: Any) -> Tensor:
        trunk_ok_ST = torch.arange(batch.trunk_ST.shape[1], device=self.device) < batch.trunk_len_S[:, None]
        same_SLL = _same_branch(batch.owner_SL, batch.branch_pos_SL)
        to_trunk_SLT = trunk_ok_ST[:, None, :].expand(-1, same_SLL.shape[1], -1)
        mask_S1LK = torch.cat([to_trunk_SLT, same_SLL], dim=-1)[:, None]
        out = self._inner()(
            input_ids=batch.branch_SL,
            position_ids=batch.branch_pos_SL,
            attention_mask=self._mask(mask_S1LK),
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state  # type: ignore[no-any-return]

    def _packed(self, batch: SlateBatch) -> Tensor:
        S, T = batch.trunk_ST.shape
        ids = torch.cat([batch.trunk_ST, batch.branch_SL], dim=1)
        trunk_pos_ST = torch.arange(T, device=ids.device).expand(S, T)
        position = torch.cat([trunk_pos_ST, batch.branch_pos_SL], dim=1)
        # Owner of a token: -2 the trunk (everybody may look back at it), -1 padding, else its branch.
        owner = torch.cat([torch.where(trunk_pos_ST < batch.trunk_len_S[:, None], -2, -1), batch.owner_SL], dim=1)
        mask: Any
        if self.backbone.config._attn_implementation == "flex_attention":
            mask = _block_mask(owner, position)
        else:
            mask = self._mask(_may_see(owner, position)[:, None])
        out = self._inner()(input_ids=ids, position_ids=position, attention_mask=mask, use_cache=False)
        return out.last_hidden_state[:, T:]  # type: ignore[no-any-return]

    def _mask(self, allowed: Tensor) -> Tensor:
        if self.backbone.config._attn_implementation != "eager":
            return allowed
        low = torch.finfo(self.backbone.dtype).min
        return torch.zeros(allowed.shape, dtype=self.backbone.dtype, device=allowed.device).masked_fill(~allowed, low)

    def _inner(self) -> nn.Module:
        # The decoder without its LM head; PEFT wraps layers in place, so the hooks of an adapter are kept.
        base = self.backbone.get_base_model() if hasattr(self.backbone, "get_base_model") else self.backbone
        return base.base_model  # type: ignore[no-any-return, union-attr]


def _same_branch(owner_SL: Tensor, position_SL: Tensor) -> Tensor:
    same = owner_SL[:, :, None] == owner_SL[:, None, :]
    causal = position_SL[:, :, None] >= position_SL[:, None, :]
    return same & causal


def _may_see(owner: Tensor, position: Tensor) -> Tensor:
    """Block mask (S, N, N): the trunk is causal; a branch sees the trunk and its own earlier tokens."""
    query, key = owner[:, :, None], owner[:, None, :]
    causal = position[:, :, None] >= position[:, None, :]
    return (key == -2) & ((query >= 0) | causal) | (query == key) & causal


def _block_mask(owner: Tensor, position: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        causal = position[b, q] >= position[b, k]
        return (owner[b, k] == -2) & ((owner[b, q] >= 0) | causal) | (owner[b, q] == owner[b, k]) & causal

    S, N = owner.shape
    return create_block_mask(allowed, S, None, N, N, device=str(owner.device))
