"""Slates, a model and stores for the tests of static slates."""

import numpy as np
import torch
from decision_toy import shake, tiny_decision, toy_corpus
from fakes import make_slate

from retrail.models.decision.batch import SlateBatch
from retrail.models.decision.scorer import LocalScorer
from retrail.models.decision.static_build import build_static, plan_static
from retrail.models.decision.trunks import trunk_key
from retrail.models.protocols import Slate

KINDS = [("pointer", "late"), ("pointer", "end"), ("yes_no", "late")]
LONG = "where is the office of the appeal, and what does it say of taxes? " * 8
QUERIES = ["alpha taxes?", LONG, "no", "where is the appeal office of beta?"]
# Slates of several queries, of one candidate, and one whose trunk is no multiple of 32 tokens long.
CANDIDATES = [make_slate(4).candidates, make_slate(1).candidates, make_slate(6, seed=2).candidates]
SLATES = [Slate(query, candidates) for candidates in CANDIDATES for query in QUERIES] + [make_slate(3, seed=9)]


def first(head="pointer", readout="late", **decision):
    model, layout = tiny_decision(head, order="candidates_first", readout=readout, **decision)
    if model.head is not None:
        model.head.requires_grad_(True)
        shake(model)
        model.head.log_scale.data.fill_(1.0)
        model.head.relevance.bias.data.fill_(-0.5)
    return model, layout


def store_of(model, layout, tmp_path, corpus=None, levels=2):
    corpus = corpus or toy_corpus()
    scorer = LocalScorer(model, layout)
    return build_static(scorer, corpus, plan_static(scorer, corpus, levels), tmp_path / "store")


class Memories:
    """A store in memory of the trunks of these candidates."""

    def __init__(self, model, layout, candidates):
        packed = [layout.pack(["?"], some) for some in candidates]
        with torch.no_grad():
            self.kept = dict(zip(map(trunk_key, packed), model.read_trunks(SlateBatch.of(packed)), strict=True))

    def check_model(self, model, layout):
        pass

    def get(self, key):
        return self.kept.get(key)


def same(first_answers, second_answers, atol=1e-6):
    assert len(first_answers) == len(second_answers)
    for a, b in zip(first_answers, second_answers, strict=True):
        np.testing.assert_allclose(a.values_C, b.values_C, atol=atol, rtol=0)
        assert a.notes == b.notes
