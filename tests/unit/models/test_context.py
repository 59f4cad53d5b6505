"""Slates and the context of the model: what is never filled further, and who says so."""

from dataclasses import asdict

import pytest
import torch
from decision_rows import build
from fakes import make_slate

from retrail.models.backbone import tiny_twin
from retrail.models.config import DecisionConfig
from retrail.models.decision.build import contract, open_layout, wrap_decision
from retrail.models.decision.scorer import LocalScorer
from retrail.models.decision.slates import Pool, score_pools, split
from retrail.models.protocols import Candidate, Slate

HEADS = pytest.mark.parametrize("head", ["pointer", "yes_no"])
SMALL = {"max_candidate_tokens": 40, "max_brief_tokens": 40, "max_query_tokens": 30, "min_label_mass": 0.0}


def backbone_of(context):
    """A tiny model that was made for so many positions, and its tokenizer."""
    backbone, tokenizer = tiny_twin("llama", torch.device("cpu"), torch.float32, "sdpa")
    backbone.config.max_position_embeddings = context
    return backbone, tokenizer


def scorer_of(context, head, **decision):
    backbone, tokenizer = backbone_of(context)
    layout = open_layout(tokenizer, DecisionConfig(head=head, **{**SMALL, **decision}), backbone)
    return LocalScorer(wrap_decision(backbone, layout), layout)


@HEADS
def test_the_shorter_of_setting_and_context_holds(head):
    layout = build(head=head, max_slate_tokens=100_000)[1]
    assert layout.max_slate_tokens == layout.context == 32_768
    assert build(head=head, max_slate_tokens=3000)[1].max_slate_tokens == 3000
    shorter = build(head=head, max_slate_tokens=32_768)[1]
    assert layout.max_candidate_tokens_per_slate == shorter.max_candidate_tokens_per_slate
    # The export's contract holds the setting, whatever model it is read with.
    assert contract(layout)["decision"] == asdict(DecisionConfig(head=head, max_slate_tokens=100_000))


@HEADS
@pytest.mark.parametrize("order", ["query_first", "candidates_first"])
def test_no_position_is_beyond_the_context(head, order):
    scorer = scorer_of(1500, head, order=order)
    seen = []
    rotary = scorer.model.backbone.model.rotary_emb
    rotary.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    pool = Pool("alpha?", make_slate(50, words=40).candidates)
    [scores] = score_pools(scorer, [pool])
    assert scores.num_slates > 1 and scores.values_C.shape == (50,)
    for none in (False, True):
        scorer.choose(split(pool, scorer), none=none)
    assert 700 < max(seen) < 1500


@HEADS
@pytest.mark.parametrize("ask", ["yes", "choose"])
def test_a_slate_beyond_the_context_is_refused(head, ask):
    """Whoever does not split a level is told to; the model would answer with positions that it never saw."""
    scorer = scorer_of(1500, head)
    with pytest.raises(
        ValueError, match=r"a slate of 50 candidates takes \d+ positions, .* made for 1500: show it fewer"
    ):
        getattr(scorer, ask)([make_slate(50, words=40)])
    getattr(scorer, ask)([make_slate(10, words=40)])


@HEADS
def test_one_candidate_larger_than_the_context(head):
    """It is cut to `max_candidate_tokens`, with a note; a model that cannot hold so much is refused at the start."""
    scorer = scorer_of(900, head)
    [answer] = scorer.yes([Slate("alpha?", (Candidate("a", "Title", "long " * 2000, "Guide"),))])
    assert answer.notes == ("text of a cut from 10008 to 40 tokens",)
    backbone, tokenizer = backbone_of(900)
    with pytest.raises(
        ValueError, match=r"20000 \(cut to 900, the context of the model\) cannot .*=800.*; lower the others"
    ):
        open_layout(tokenizer, DecisionConfig(head=head, max_candidate_tokens=800), backbone)


def test_a_layout_that_knows_no_context_is_refused_by_the_model():
    backbone, tokenizer = backbone_of(900)
    layout = open_layout(tokenizer, DecisionConfig(**SMALL))
    assert layout.max_slate_tokens == 20_000 and layout.context is None
    with pytest.raises(
        ValueError, match="max_slate_tokens=20000 .*max_position_embeddings=900.*open the layout with the"
    ):
        wrap_decision(backbone, layout)
    wrap_decision(backbone, open_layout(tokenizer, DecisionConfig(**SMALL, max_slate_tokens=900)))
