"""The decision network: a causal language model read at a few positions of a packed slate.

Shapes: S slates of a batch, T longest trunk, C candidates, Q questions of all slates together, L longest row of
branch tokens, H hidden size, V vocabulary.

The branch readout touches two rows of the LM head at Q positions and never builds a (tokens x V) matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import check_choice
from .layout import PackedSlate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Owners of a token that is no branch's, and how many rows of the LM head's output are in memory together.
_TRUNK, _PADDING = -2, -1
_ROWS_AT_ONCE = 64
# Trunks are padded to a multiple of this: kernels are prepared once a shape, and there are fewer shapes.
_LENGTH_STEP = 32


class PointerHead(nn.Module):
    """Trained readout without branches: the query's states are compared with each candidate's.

    logit_c = scale * s_c + w . norm(h_end_c) + b; P(yes) = sigmoid(logit), where the similarity s_c is

    readout `end`: cos(Q h_decide, K h_end_c), the last token of the trunk against the candidate's last one;
    readout `late`: mean over the tokens q of the repeated query of max over the candidate's tokens t of
        cos(Q (h_q - m), K (h_t - m)), with m the mean state of the trunk (ColBERT's MaxSim, arXiv 2004.12832, on states
        that have read the query and each other).

    Q and K start as the identity, w at zero, so that the untrained head ranks by similarity of contextual states.
    Kept and computed in float32, under autocast too.
    """

    def __init__(self, hidden_size: int, readout: str = "late") -> None:
        """Start from the identity; `late` similarities lie near one half, so b starts at minus half the scale."""
        super().__init__()
        check_choice("readout", readout, ("late", "end"))
        self.readout = readout
        scale = 20.0 if readout == "late" else 10.0
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.relevance = nn.Linear(hidden_size, 1)
        self.log_scale = nn.Parameter(torch.tensor(scale).log())
        with torch.no_grad():
            self.query.weight.copy_(torch.eye(hidden_size))
            self.key.weight.copy_(torch.eye(hidden_size))
            self.relevance.weight.zero_()
            self.relevance.bias.fill_(-scale / 2 if readout == "late" else 0.0)

    def forward(self, hidden_STH: Tensor, batch: SlateBatch) -> Tensor:
        """Log-odds of yes (Q,) of every candidate asked about, from the states of the trunks."""
        with torch.autocast(hidden_STH.device.type, enabled=False):
            hidden_STH = hidden_STH.float()
            ends_QH = hidden_STH[batch.end_slate_Q, batch.end_pos_Q]
            if self.readout == "end":
                decide_QH = _last(hidden_STH, batch.trunk_len_S)[batch.end_slate_Q]
                similarity_Q = functional.cosine_similarity(self.query(decide_QH), self.key(ends_QH), dim=-1)
            else:
                similarity_Q = self._late(hidden_STH, batch)
            level_Q: Tensor = self.relevance(functional.layer_norm(ends_QH, ends_QH.shape[-1:])).squeeze(-1)
            return self.log_scale.exp() * similarity_Q + level_Q

    def _late(self, hidden_STH: Tensor, batch: SlateBatch) -> Tensor:
        """Mean over query tokens of the best match among a candidate's tokens (Q,)."""
        place_T = torch.arange(hidden_STH.shape[1], device=hidden_STH.device)
        real_ST = (place_T < batch.trunk_len_S[:, None]).to(hidden_STH.dtype)
        mean_SH = (real_ST[..., None] * hidden_STH).sum(1) / batch.trunk_len_S[:, None]
        centred_STH = hidden_STH - mean_SH[:, None]
        slate_S1 = torch.arange(len(centred_STH), device=hidden_STH.device)[:, None]
        query_SMH = functional.normalize(self.query(centred_STH[slate_S1, batch.query_pos_SM]), dim=-1)
        keys_STH = functional.normalize(self.key(centred_STH), dim=-1)
        match_SMT = query_SMH @ keys_STH.transpose(1, 2)
        # Indexed at once: (Q, M, T) never exists.
        token_M = torch.arange(match_SMT.shape[1], device=hidden_STH.device)
        match_QMW = match_SMT[batch.end_slate_Q[:, None, None], token_M[:, None], batch.span_pos_QW[:, None]]
        asks_SM = (batch.query_pos_SM < batch.trunk_len_S[:, None]).to(match_QMW.dtype)
        weight_SM = asks_SM / asks_SM.sum(1, keepdim=True)
        return (match_QMW.amax(2) * weight_SM[batch.end_slate_Q]).sum(1)


@dataclass(frozen=True, slots=True)
class SlateBatch:
    """Several packed slates as tensors, trunks padded on the right.

    trunk_ST, trunk_len_S; ends: (slate, position) of every candidate asked about; span_pos_QW: all its positions,
    padded by its last; query_pos_SM: positions of the repeated query, padded by T - 1, which is padding always; the
    branches of a slate one after the other, padded on the right: branch_SL, branch_pos_SL, owner_SL (question number
    in its slate, -1 padding); reads: (slate, place in the branch row) of each branch's last token.
    """

    slates: tuple[PackedSlate, ...]
    trunk_ST: Tensor
    trunk_len_S: Tensor
    end_slate_Q: Tensor
    end_pos_Q: Tensor
    span_pos_QW: Tensor
    query_pos_SM: Tensor
    branch_SL: Tensor
    branch_pos_SL: Tensor
    owner_SL: Tensor
    read_slate_Q: Tensor
    read_pos_Q: Tensor

    @classmethod
    def of(cls, slates: Sequence[PackedSlate]) -> SlateBatch:
        """Tensors of these slates, on the CPU."""
        S = len(slates)
        T = -(-max(len(s.trunk) + 1 for s in slates) // _LENGTH_STEP) * _LENGTH_STEP
        L = max(sum(map(len, s.branches)) for s in slates)
        trunk, branch = torch.zeros(S, T, dtype=torch.long), torch.zeros(S, L, dtype=torch.long)
        position, owner = torch.zeros(S, L, dtype=torch.long), torch.full((S, L), _PADDING)
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
        spans = _padded([range(a, b + 1) for s in slates for a, b in zip(s.starts, s.ends, strict=True)])
        queries = _padded([range(s.query_start, len(s.trunk)) for s in slates], fill=T - 1)
        tensors = (
            trunk,
            lengths,
            end[:, 0],
            end[:, 1],
            spans,
            queries,
            branch,
            position,
            owner,
            read[:, 0],
            read[:, 1],
        )
        return cls(tuple(slates), *tensors)

    def to(self, device: torch.device | str) -> SlateBatch:
        """The same batch on another device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "slates"}
        return SlateBatch(self.slates, **moved)

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

    Raises:
        ValueError: the backbone's logits or layers do not allow the readout, or `attention` is unknown.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        label_ids: tuple[int, int] | None,
        attention: str = "two_pass",
        readout: str = "late",
    ) -> None:
        """`label_ids` = (yes, no) for a yes/no head, None for a pointer head, whose `readout` see `PointerHead`.

        attention: `two_pass` (trunk, then all branches against its keys and values), or `packed`
            (one pass under a block mask; a FlexAttention `BlockMask` where the backbone uses it). Training with
            activation checkpointing is packed always: layers that are computed twice cannot fill a cache.
        """
        super().__init__()
        check_choice("attention", attention, ("two_pass", "packed"))
        if label_ids is not None:
            _refuse_unreadable(backbone.config.get_text_config())
        self.backbone = backbone
        self.label_ids = label_ids
        self.attention = attention
        self.head = PointerHead(backbone.config.get_text_config().hidden_size, readout) if label_ids is None else None

    @property
    def device(self) -> torch.device:
        """Where the embedding lives."""
        embedding: Any = self.backbone.get_input_embeddings()
        return embedding.weight.device  # type: ignore[no-any-return]

    def forward(self, batch: SlateBatch, choices: SlateBatch | None = None) -> tuple[Tensor, Tensor | None]:
        """What training needs in one call: log-odds of yes (Q,), and the logits of `choices` where given."""
        return self.yes_logits(batch), None if choices is None else self.choice_logits(choices)

    def yes_logits(self, batch: SlateBatch) -> Tensor:
        """Log-odds of yes (Q,), float32."""
        if self.head is None:
            return self.log_odds(self.read_states(batch))
        # Padding stands on the right and attention is causal: no real token sees it, so no mask is needed and the
        # fastest kernel runs.
        hidden_STH = self._decoder()(input_ids=batch.trunk_ST, use_cache=False).last_hidden_state
        return self.head(hidden_STH, batch)  # type: ignore[no-any-return]

    def read_states(self, batch: SlateBatch) -> Tensor:
        """The state of each branch's last token (Q, H), whose next token is the answer."""
        return self._states(batch)[1][batch.read_slate_Q, batch.read_pos_Q]

    def log_odds(self, states_QH: Tensor) -> Tensor:
        """logit(yes) - logit(no) (Q,) from two rows of the LM head, float32."""
        assert self.label_ids is not None
        lm_head: Any = self.backbone.get_output_embeddings()
        bias = getattr(lm_head, "bias", None)
        with torch.autocast(states_QH.device.type, enabled=False):
            rows_2H = lm_head.weight[list(self.label_ids)].float()
            bias_2 = None if bias is None else bias[list(self.label_ids)].float()
            logits_Q2 = functional.linear(states_QH.float(), rows_2H, bias_2)
        return logits_Q2[:, 0] - logits_Q2[:, 1]

    def label_mass(self, states_QH: Tensor) -> Tensor:
        """P(yes) + P(no) among all next tokens (Q,), a few questions at a time (memory: 64 x V)."""
        assert self.label_ids is not None
        logp_QV = (self._log_probs(part)[:, list(self.label_ids)] for part in states_QH.split(_ROWS_AT_ONCE))
        return torch.cat([part.logsumexp(-1).exp() for part in logp_QV])

    def choice_logits(self, batch: SlateBatch) -> Tensor:
        """Logits (Q,) whose softmax inside a slate is the answer to its multiple-choice question.

        Yes/no head: log-probability of each option's label tokens after the trunk. Pointer head: its log-odds.
        """
        if self.head is not None:
            return self.yes_logits(batch)
        trunk_SH, branch_SLH = self._states(batch)
        real_SL = batch.owner_SL >= 0
        first_SL = real_SL & (batch.branch_pos_SL == batch.trunk_len_S[:, None])
        later_SL = real_SL & ~first_SL
        # All labels of a slate begin after the same token, so one row of logits a slate serves them all.
        slate_F, place_F = first_SL.nonzero(as_tuple=True)
        first_F = self._log_probs(trunk_SH)[slate_F, batch.branch_SL[slate_F, place_F]]
        slate_R, place_R = later_SL.nonzero(as_tuple=True)
        before_RH, ids_R = branch_SLH[slate_R, place_R - 1], batch.branch_SL[slate_R, place_R]
        parts = zip(before_RH.split(_ROWS_AT_ONCE), ids_R.split(_ROWS_AT_ONCE), strict=True)
        later_R = torch.cat([self._log_probs(h).gather(1, ids[:, None])[:, 0] for h, ids in parts])
        sizes_S = batch.owner_SL.amax(1) + 1
        offset_S = sizes_S.cumsum(0) - sizes_S
        question_F = offset_S[slate_F] + batch.owner_SL[slate_F, place_F]
        question_R = offset_S[slate_R] + batch.owner_SL[slate_R, place_R]
        total_Q = torch.zeros(len(batch.end_pos_Q), device=first_F.device)
        return total_Q.index_add(0, question_F, first_F).index_add(0, question_R, later_R)

    def _log_probs(self, states_NH: Tensor) -> Tensor:
        return self.backbone.get_output_embeddings()(states_NH).float().log_softmax(-1)  # type: ignore[no-any-return]

    def _states(self, batch: SlateBatch) -> tuple[Tensor, Tensor]:
        """The state of each trunk's last token (S, H) and of all branch tokens (S, L, H)."""
        T = batch.trunk_ST.shape[1]
        place_ST = torch.arange(T, device=batch.trunk_ST.device).expand_as(batch.trunk_ST)
        trunk_owner_ST = torch.where(place_ST < batch.trunk_len_S[:, None], _TRUNK, _PADDING)
        owner_SN = torch.cat([trunk_owner_ST, batch.owner_SL], dim=1)
        place_SN = torch.cat([place_ST, batch.branch_pos_SL], dim=1)
        if self.attention == "packed" or self._recomputes_layers():
            out = self._decoder()(
                input_ids=torch.cat([batch.trunk_ST, batch.branch_SL], dim=1),
                position_ids=place_SN,
                attention_mask=self._mask(owner_SN, place_SN, 0),
                use_cache=False,
            ).last_hidden_state
            return _last(out[:, :T], batch.trunk_len_S), out[:, T:]
        trunk = self._decoder()(input_ids=batch.trunk_ST, use_cache=True)
        branches = self._decoder()(
            input_ids=batch.branch_SL,
            position_ids=batch.branch_pos_SL,
            attention_mask=self._mask(owner_SN, place_SN, T),
            cache=trunk.cache,
            use_cache=True,
        )
        return _last(trunk.last_hidden_state, batch.trunk_len_S), branches.last_hidden_state

    def _mask(self, owner_SN: Tensor, place_SN: Tensor, start: int) -> Any:
        """Who sees whom, for the tokens from `start` on as readers, in the form that the attention kernel takes."""
        kind = self.backbone.config._attn_implementation
        if kind == "flex_attention":
            return _block_mask(owner_SN, place_SN, start)
        reader, seen = (slice(None), slice(start, None), None), (slice(None), None)
        allowed = _may_see(owner_SN[reader], place_SN[reader], owner_SN[seen], place_SN[seen])[:, None]
        if kind != "eager":
            return allowed
        dtype = self.backbone.dtype
        low = torch.finfo(dtype).min
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, low)

    def _recomputes_layers(self) -> bool:
        return self.training and torch.is_grad_enabled() and bool(self._decoder().is_activation_checkpointing)

    def _decoder(self) -> Any:
        # The decoder without its LM head; PEFT wraps layers in place, so the hooks of an adapter are kept.
        backbone: Any = self.backbone
        return (backbone.get_base_model() if hasattr(backbone, "get_base_model") else backbone).base_model


def _padded(ranges: Sequence[range], fill: int | None = None) -> Tensor:
    """Rows of positions (N, W), each filled up with `fill` or its own last position."""
    width = max((len(r) for r in ranges), default=0)
    rows = [[*r, *[r[-1] if fill is None else fill] * (width - len(r))] for r in ranges]
    return torch.tensor(rows, dtype=torch.long).reshape(len(ranges), width)


def _last(hidden_STH: Tensor, length_S: Tensor) -> Tensor:
    return hidden_STH[torch.arange(len(length_S), device=hidden_STH.device), length_S - 1]


def _may_see(owner_q: Tensor, place_q: Tensor, owner_k: Tensor, place_k: Tensor) -> Tensor:
    """The block mask: the trunk is causal; a branch sees the trunk and its own earlier tokens.

    Branches start behind their trunk, so "not later" covers both; padding sees at least itself, lest a row be empty.
    """
    return (place_k <= place_q) & ((owner_k == _TRUNK) | (owner_k == owner_q))


def _block_mask(owner_SN: Tensor, place_SN: Tensor, start: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _may_see(owner_SN[b, q + start], place_SN[b, q + start], owner_SN[b, k], place_SN[b, k])

    S, N = owner_SN.shape
    return create_block_mask(allowed, S, None, N - start, N, device=str(owner_SN.device))


def _refuse_unreadable(config: Any) -> None:
    """Raise ValueError for models whose logits are not plain rows, or whose attention takes no block mask."""
    name = getattr(config, "model_type", "this model")
    for key, plain in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1)):
        if getattr(config, key, None) not in (None, plain):
            raise ValueError(
                f"{name} caps or scales its logits ({key}={getattr(config, key)}), which a readout of two rows of the "
                "LM head would not see; use another model or decision.head=pointer"
            )
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        raise ValueError(
            f"{name} has layers without full attention ({', '.join(sorted(kinds)) or 'sliding_window'}), which cannot "
            "isolate yes/no branches; use another model or decision.head=pointer"
        )
