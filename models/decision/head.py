"""The trained readout of a decision model: states of the query against states of the candidates.

Shapes: S slates of a batch, N queries of a slate, M tokens of a query, C candidates of a slate, W tokens of a
candidate, T longest trunk, K trunk and branch tokens together, Q questions (a query about a candidate) of all slates,
H hidden size, X query tokens that are matched together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import check_choice
from .batch import SlateBatch
from .trunks import CandidateKeys

# Query tokens that are matched at once: memory is this many times all tokens of a slate's candidates.
_TOKENS_AT_ONCE = 1024


class PointerHead(nn.Module):
    """Trained readout without questions in words: the query's states are compared with each candidate's.

    logit_c = scale * s_c + w . norm(h_end_c) + b; P(yes) = sigmoid(logit), where the similarity s_c is

    readout `end`: cos(Q h_decide, K h_end_c), the last token of the query against the candidate's last one;
    readout `late`: sum over the tokens q of the query of a_q * max over the candidate's tokens t of
        cos(Q (h_q - m), K (h_t - m)), with m the mean state of the trunk and a = softmax(u . norm(h_q)) the importance
        of a token among those of its query (ColBERT's MaxSim, arXiv 2004.12832, on states that have read the slate,
        with learnt instead of equal weights). The heading of its page counts among a candidate's tokens.

    Q and K start as the identity, w and u at zero, so that the untrained head ranks by similarity of contextual states,
    all tokens counting alike. Kept and computed in float32, under autocast too.
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
        self.importance = nn.Linear(hidden_size, 1, bias=False) if readout == "late" else None
        self.log_scale = nn.Parameter(torch.tensor(scale).log())
        with torch.no_grad():
            self.query.weight.copy_(torch.eye(hidden_size))
            self.key.weight.copy_(torch.eye(hidden_size))
            self.relevance.weight.zero_()
            self.relevance.bias.fill_(-scale / 2 if readout == "late" else 0.0)
            if self.importance is not None:
                self.importance.weight.zero_()

    def forward(self, hidden_SKH: Tensor, batch: SlateBatch) -> Tensor:
        """Log-odds of yes (Q,) of every question, from the states of the trunks and, behind them, of the branches."""
        keys = self.candidate_keys(hidden_SKH[:, : batch.trunk_ST.shape[1]], batch)
        return self.compare(keys, hidden_SKH, batch.query_pos_SNM, batch)

    def candidate_keys(self, trunk_STH: Tensor, batch: SlateBatch) -> CandidateKeys:
        """The candidates' side of the comparison, from the states of the trunks: the same for all queries behind it."""
        with torch.autocast(trunk_STH.device.type, enabled=False):
            trunk_STH = trunk_STH.float()
            ends_SCH = _take(trunk_STH, batch.end_pos_SC)
            T = trunk_STH.shape[1]
            real_ST = (torch.arange(T, device=trunk_STH.device) < batch.trunk_len_S[:, None]).to(trunk_STH.dtype)
            mean_SH = (real_ST[..., None] * trunk_STH).sum(1) / batch.trunk_len_S[:, None]
            states_SKH = ends_SCH if self.readout == "end" else trunk_STH - mean_SH[:, None]
            keys_SKH = functional.normalize(self.key(states_SKH), dim=-1)
            return CandidateKeys(keys_SKH, mean_SH, self.relevance(_norm(ends_SCH)).squeeze(-1))

    def compare(self, keys: CandidateKeys, states_SKH: Tensor, query_pos_SNM: Tensor, batch: SlateBatch) -> Tensor:
        """Log-odds of yes (Q,) of every question; the tokens of each query are at `query_pos_SNM` of the states."""
        with torch.autocast(states_SKH.device.type, enabled=False):
            states_SKH = states_SKH.float()
            if self.readout == "end":
                last_SN = query_pos_SNM.amax(2).clamp(min=0)
                decide_SNH = functional.normalize(self.query(_take(states_SKH, last_SN)), dim=-1)
                similarity_SNC = decide_SNH @ keys.keys_SKH.transpose(1, 2)
            else:
                similarity_SNC = self._late(keys, states_SKH, query_pos_SNM, batch)
            logits_SNC = self.log_scale.exp() * similarity_SNC + keys.level_SC[:, None]
            return logits_SNC[batch.slate_Q, batch.query_Q, batch.candidate_Q]

    def _late(self, keys: CandidateKeys, states_SKH: Tensor, query_pos_SNM: Tensor, batch: SlateBatch) -> Tensor:
        """Weighted mean over query tokens of the best match among a candidate's tokens (S, N, C)."""
        assert self.importance is not None
        S, N, M = query_pos_SNM.shape
        asked_SXH = _take(states_SKH, query_pos_SNM.clamp(min=0).flatten(1))
        query_SXH = functional.normalize(self.query(asked_SXH - keys.mean_SH[:, None]), dim=-1)
        parts = query_SXH.split(_TOKENS_AT_ONCE, dim=1)
        best_SXC = torch.cat([_best_match(part, keys.keys_SKH, batch.span_pos_SCW) for part in parts], dim=1)
        weight_SNM: Tensor = self.importance(_norm(asked_SXH)).reshape(S, N, M)
        weight_SNM = weight_SNM.masked_fill(query_pos_SNM < 0, torch.finfo(weight_SNM.dtype).min).softmax(-1)
        return (weight_SNM[..., None] * best_SXC.reshape(S, N, M, -1)).sum(2)


def _best_match(query_SXH: Tensor, keys_STH: Tensor, span_pos_SCW: Tensor) -> Tensor:
    """For each query token the best similarity among each candidate's tokens (S, X, C)."""
    match_SXT = query_SXH @ keys_STH.transpose(1, 2)
    S, C, W = span_pos_SCW.shape
    X = match_SXT.shape[1]
    places = span_pos_SCW.reshape(S, 1, C * W).expand(-1, X, -1)
    return match_SXT.gather(2, places).reshape(S, X, C, W).amax(3)


def _take(states_SKH: Tensor, places: Tensor) -> Tensor:
    """States at (slate, place) for places (S, ...)."""
    slate = torch.arange(len(places), device=places.device).reshape(-1, *[1] * (places.dim() - 1))
    return states_SKH[slate, places]


def _norm(states: Tensor) -> Tensor:
    return functional.layer_norm(states, states.shape[-1:])
