"""The decision network: a causal language model read at a few positions of a packed slate.

Shapes: S slates of a batch, T longest trunk, C candidates, Q questions of all slates together, L longest row of
branch tokens, H hidden size, V vocabulary.

The branch readout touches two rows of the LM head at Q positions and never builds a (tokens x V) matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import check_choice
from ..tree_attention import tree_mask
from .batch import SlateBatch
from .head import PointerHead
from .layout import SlateLayout
from .trunks import TrunkMemory, cut_trunks, join_caches, join_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# How many rows of the LM head's output are in memory together.
_ROWS_AT_ONCE = 64


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
        if batch.kept:
            T = batch.trunk_ST.shape[1]
            asked_SNM = torch.where(batch.query_pos_SNM < 0, -1, batch.query_pos_SNM - T)
            return self.head.compare(join_heads(batch.kept), self._states(batch)[1], asked_SNM, batch)
        if batch.branch_SL.shape[1]:
            hidden_SKH = torch.cat(self._states(batch), dim=1)
        else:
            # Padding stands on the right and attention is causal: no real token sees it, so no mask is needed and the
            # fastest kernel runs.
            hidden_SKH = self._decoder()(input_ids=batch.trunk_ST, use_cache=False).last_hidden_state
        return self.head(hidden_SKH, batch)  # type: ignore[no-any-return]

    def read_trunks(self, batch: SlateBatch) -> list[TrunkMemory]:
        """What a pass over the trunks alone leaves for branches: with `SlateBatch.kept` they are read no more.

        Raises:
            ValueError: a layer of the model keeps something else than keys and values of every token.
        """
        trunk = self._decoder()(input_ids=batch.trunk_ST, use_cache=True)
        keys = None if self.head is None else self.head.candidate_keys(trunk.last_hidden_state, batch)
        return cut_trunks(trunk.cache, trunk.last_hidden_state, keys, batch.slates)

    def read_states(self, batch: SlateBatch) -> Tensor:
        """The state of each branch's last token (Q, H), whose next token is the answer."""
        return self._states(batch)[1][batch.read_slate_B, batch.read_pos_B]

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
        Where a slate offers none-of-these, they are log-odds against that, which therefore has logit 0; those of a
        pointer head, which its training sets against nothing being right, always are.
        """
        if self.head is not None:
            return self.yes_logits(batch)
        return _against_none(self.label_log_probs(batch), batch)

    def label_log_probs(self, batch: SlateBatch) -> Tensor:
        """Log-probability of each branch's label tokens, given all before them (B,), float32."""
        trunk_STH, branch_SLH = self._states(batch)
        rows_SLH = torch.cat([_last(trunk_STH, batch.trunk_len_S)[:, None], branch_SLH], dim=1)
        label_SL = torch.zeros_like(batch.branch_SL, dtype=torch.bool)
        slate_B, real_BK = batch.read_slate_B[:, None].expand_as(batch.label_pos_BK), batch.label_pos_BK >= 0
        label_SL[slate_B[real_BK], batch.label_pos_BK[real_BK]] = True
        slate_R, place_R = label_SL.nonzero(as_tuple=True)
        before_RH = rows_SLH[slate_R, batch.before_SL[slate_R, place_R] + 1]
        token_R = batch.branch_SL[slate_R, place_R]
        parts = zip(before_RH.split(_ROWS_AT_ONCE), token_R.split(_ROWS_AT_ONCE), strict=True)
        logp_R = torch.cat([self._log_probs(h).gather(1, ids[:, None])[:, 0] for h, ids in parts])
        logp_SL = torch.zeros(label_SL.shape, device=logp_R.device).index_put((slate_R, place_R), logp_R)
        return torch.where(real_BK, logp_SL[slate_B, batch.label_pos_BK.clamp(min=0)], 0.0).sum(1)

    def _log_probs(self, states_NH: Tensor) -> Tensor:
        return self.backbone.get_output_embeddings()(states_NH).float().log_softmax(-1)  # type: ignore[no-any-return]

    def _states(self, batch: SlateBatch) -> tuple[Tensor, Tensor]:
        """The states of all trunk tokens (S, T, H) and of all branch tokens (S, L, H).

        Of a trunk that was read before only the last one is known, and stands for all.
        """
        T = batch.trunk_ST.shape[1]
        N = T + batch.branch_SL.shape[1]
        place_ST = torch.arange(T, device=batch.trunk_ST.device).expand_as(batch.trunk_ST)
        trunk_until_ST = torch.where(place_ST < batch.trunk_len_S[:, None], N, -1)
        branch_until_SL = torch.where(batch.until_SL >= 0, batch.until_SL + T, -1)
        until_SN = torch.cat([trunk_until_ST, branch_until_SL], dim=1)
        if batch.kept:
            last_SH = torch.stack([memory.last_H for memory in batch.kept])
            branches = self._branches(batch, until_SN, join_caches(batch.kept, T))
            return last_SH[:, None].expand(-1, T, -1), branches
        if self.attention == "packed" or self._recomputes_layers():
            out = self._decoder()(
                input_ids=torch.cat([batch.trunk_ST, batch.branch_SL], dim=1),
                position_ids=torch.cat([place_ST, batch.branch_pos_SL], dim=1),
                attention_mask=tree_mask(self.backbone, until_SN),
                use_cache=False,
            ).last_hidden_state
            return out[:, :T], out[:, T:]
        trunk = self._decoder()(input_ids=batch.trunk_ST, use_cache=True)
        return trunk.last_hidden_state, self._branches(batch, until_SN, trunk.cache)

    def _branches(self, batch: SlateBatch, until_SN: Tensor, cache: Any) -> Tensor:
        """The states of all branch tokens (S, L, H) against the keys and values of the trunks."""
        out = self._decoder()(
            input_ids=batch.branch_SL,
            position_ids=batch.branch_pos_SL,
            attention_mask=tree_mask(self.backbone, until_SN, batch.trunk_ST.shape[1]),
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state  # type: ignore[no-any-return]

    def _recomputes_layers(self) -> bool:
        return self.training and torch.is_grad_enabled() and bool(self._decoder().is_activation_checkpointing)

    def _decoder(self) -> Any:
        # The decoder without its LM head; PEFT wraps layers in place, so the hooks of an adapter are kept.
        backbone: Any = self.backbone
        return (backbone.get_base_model() if hasattr(backbone, "get_base_model") else backbone).base_model


def _against_none(logp_B: Tensor, batch: SlateBatch) -> Tensor:
    """Log-probabilities of the options (Q,), less that of none-of-these where a slate offers it."""
    if not any(slate.none for slate in batch.slates):
        return logp_B
    options: list[int] = []
    against: list[int] = []  # the branch of none-of-these, or one past the last
    start = 0
    for slate in batch.slates:
        count = len(slate.ends)
        for _ in slate.queries:
            options += range(start, start + count)
            against += [start + count if slate.none else len(logp_B)] * count
            start += count + slate.none
    return logp_B[options] - functional.pad(logp_B, (0, 1))[against]


def _last(hidden_STH: Tensor, length_S: Tensor) -> Tensor:
    return hidden_STH[torch.arange(len(length_S), device=hidden_STH.device), length_S - 1]


def _refuse_unreadable(config: Any) -> None:
    """Raise ValueError for models whose logits are not plain rows, or whose attention takes no block mask."""
    name = getattr(config, "model_type", "this model")
    for key, plain in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1)):
        if getattr(config, key, None) not in (None, plain):
            raise ValueError(
                f"{name} caps or scales its logits ({key}={getattr(config, key)}), which a readout of two rows of the "
                "LM head would not see; use another model or decision.head=pointer"
            )
    if partial := _partial_attention(config):
        raise ValueError(
            f"{name} has layers without full attention ({partial}), which cannot isolate yes/no branches; use another "
            "model or decision.head=pointer"
        )


def _partial_attention(config: Any) -> str:
    """The kinds of layers that do not attend to all tokens before, empty where all do."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return ", ".join(sorted(kinds))
    return "sliding_window" if not kinds and getattr(config, "sliding_window", None) else ""


def check_keepable(model: DecisionModel, layout: SlateLayout) -> None:
    """Raise ValueError where a trunk cannot be read once for all queries."""
    if not layout.candidates_first:
        raise ValueError(
            "with decision.order=query_first the candidates are read in the light of each query, so that nothing of "
            "them can be stored; train with decision.order=candidates_first, or search without static slates"
        )
    config: Any = model.backbone.config.get_text_config()
    if partial := _partial_attention(config):
        raise ValueError(
            f"{getattr(config, 'model_type', 'this model')} has layers without full attention ({partial}), which keep "
            "only a part of what they have read; search without static slates"
        )
