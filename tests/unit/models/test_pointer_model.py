"""The pointer readout of real forward passes against loops over tokens."""

import pytest
import torch
from decision_rows import build
from fakes import make_slate
from torch.nn import functional

from retrail.models.decision.batch import SlateBatch

ORDERS = ["query_first", "candidates_first"]


def states_alone(net, slate, n):
    """States of the trunk (T, H), and those of the n-th query's tokens (M, H), from one plain forward pass."""
    branch = slate.branches[n] if slate.candidates_first else []
    ids = torch.tensor([slate.trunk + branch])
    hidden = net.backbone(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    trunk, rest = hidden[: len(slate.trunk)], hidden[len(slate.trunk) :]
    return trunk, (rest if slate.candidates_first else trunk)[list(slate.queries[n])]


def late_twin(head, trunk, asked, slate):
    """The late readout of one query of one slate in loops."""
    middle = trunk.mean(0)
    weight = torch.stack([head.importance(functional.layer_norm(h, h.shape))[0] for h in asked]).softmax(0)
    out = []
    for start, end, heading in zip(slate.starts, slate.ends, slate.headings, strict=True):
        keys = [head.key(trunk[t] - middle) for t in [*heading, *range(start, end + 1)]]
        best = [max(functional.cosine_similarity(head.query(h - middle), key, dim=0) for key in keys) for h in asked]
        level = head.relevance(functional.layer_norm(trunk[end], trunk[end].shape))[0]
        out.append(head.log_scale.exp() * (weight * torch.stack(best)).sum() + level)
    return torch.stack(out)


def end_twin(head, trunk, asked, slate):
    ends = trunk[slate.ends]
    cosine = functional.cosine_similarity(head.query(asked[-1:]), head.key(ends), dim=-1)
    return 10 * cosine + head.relevance(functional.layer_norm(ends, ends.shape[-1:]))[:, 0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("readout", ["late", "end"])
@torch.no_grad()
def test_pointer_equals_its_twin_padded_or_alone(readout, order):
    net, layout = build(head="pointer", readout=readout, order=order, max_candidate_tokens=24, max_query_tokens=16)
    torch.manual_seed(0)
    for part in (net.head.relevance, net.head.query, net.head.importance):
        if part is not None:
            torch.nn.init.normal_(part.weight)
    twin = late_twin if readout == "late" else end_twin
    slates = [layout.render(make_slate(3)), layout.render(make_slate(1)), layout.render(make_slate(5), [4, 2])]
    if order == "candidates_first":
        slates.append(layout.pack(["alpha", "alpha beta?", "no"], make_slate(4).candidates))
    assert any(heading for slate in slates for heading in slate.headings)
    expected = [
        twin(net.head, *states_alone(net, slate, n), slate) for slate in slates for n in range(len(slate.queries))
    ]
    together = net.yes_logits(SlateBatch.of(slates))
    torch.testing.assert_close(together, torch.cat(expected), atol=5e-5, rtol=0)
    alone = torch.cat([net.yes_logits(SlateBatch.of([slate])) for slate in slates])
    torch.testing.assert_close(alone, torch.cat(expected), atol=5e-5, rtol=0)


@torch.no_grad()
def test_a_prompt_that_does_not_repeat_the_query_is_read_where_it_stands(monkeypatch):
    net, layout = build(head="pointer")
    monkeypatch.setattr(layout, "prompt", type(layout.prompt)(**{**fields_of(layout.prompt), "repeat_query": False}))
    packed = layout.render(make_slate(3))
    [places] = packed.queries
    assert layout.tokenizer.hf.decode(packed.trunk[places.start : places.stop]) == f"Query: {make_slate(3).query}"
    assert net.yes_logits(SlateBatch.of([packed])).isfinite().all()


def fields_of(prompt):
    return {name: getattr(prompt, name) for name in prompt.__dataclass_fields__}


@torch.no_grad()
def test_many_query_tokens_are_matched_in_parts(monkeypatch):
    net, layout = build(head="pointer", order="candidates_first")
    torch.nn.init.normal_(net.head.importance.weight)
    batch = SlateBatch.of([layout.pack(["alpha beta gamma", "no", "yes delta"], make_slate(4).candidates)])
    expected = net.yes_logits(batch)
    monkeypatch.setattr("retrail.models.decision.head._TOKENS_AT_ONCE", 7)
    torch.testing.assert_close(net.yes_logits(batch), expected, atol=1e-6, rtol=0)
