"""Static slates: what was read once answers as if it were read again; what does not fit is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decision_rows import build, row_by_row
from decision_toy import tiny_decision, toy_corpus
from static_toy import CANDIDATES, KINDS, LONG, QUERIES, SLATES, Memories, first, same, store_of

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost
from retrail.models.config import NavigateConfig
from retrail.models.decision.batch import SlateBatch
from retrail.models.decision.navigate import Navigator
from retrail.models.decision.scorer import LocalScorer
from retrail.models.decision.static import StaticError, StaticSlates, model_fingerprint
from retrail.models.decision.static_build import level_slates, plan_static
from retrail.models.protocols import Slate


@pytest.mark.parametrize("attention", ["two_pass", "packed"])
@pytest.mark.parametrize("ask", ["yes", "choose"])
@pytest.mark.parametrize(("head", "readout"), KINDS)
def test_answers_are_those_of_the_uncached_scorer(head, readout, ask, attention):
    model, layout = first(head, readout)
    model.attention = attention
    plain = LocalScorer(model, layout)
    stored = LocalScorer(model, layout, static=Memories(model, layout, CANDIDATES))
    expected = getattr(plain, ask)(SLATES)
    assert np.ptp(np.concatenate([a.values_C for a in expected])) > 1e-3
    same(getattr(stored, ask)(SLATES), expected)
    for n in (0, 1, 5, len(SLATES) - 1):  # alone as in company
        same(getattr(stored, ask)(SLATES[n : n + 1]), expected[n : n + 1])


@torch.no_grad()
def test_branches_against_a_memory_equal_whole_sequences():
    """Against one plain forward pass a question, with no mask and no cache."""
    net, layout = build(order="candidates_first", max_candidate_tokens=24, max_query_tokens=32)
    packed = [layout.pack(QUERIES, candidates) for candidates in CANDIDATES]
    memories = net.read_trunks(SlateBatch.of(packed))
    got = net.yes_logits(SlateBatch.of(packed, memories))
    torch.testing.assert_close(got, row_by_row(net, packed), atol=1e-5, rtol=0)
    for slate, memory in zip(packed, memories, strict=True):
        states_TH = net.backbone.base_model(input_ids=torch.tensor([slate.trunk])).last_hidden_state[0]
        torch.testing.assert_close(memory.last_H, states_TH[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["eager", "flex_attention"])
@torch.no_grad()
def test_other_attention_kernels(kind):
    net, layout = build(attention=kind, order="candidates_first", max_candidate_tokens=24, max_query_tokens=32)
    packed = [layout.pack(QUERIES[:1], candidates) for candidates in CANDIDATES[:2]]
    memories = net.read_trunks(SlateBatch.of(packed))
    expected = net.yes_logits(SlateBatch.of(packed))
    torch.testing.assert_close(net.yes_logits(SlateBatch.of(packed, memories)), expected, atol=1e-5, rtol=0)


def test_only_the_queries_are_read(monkeypatch):
    model, layout = first()
    stored = LocalScorer(model, layout, static=Memories(model, layout, CANDIDATES))
    read = []
    forward = model.backbone.base_model.forward
    monkeypatch.setattr(
        model.backbone.base_model, "forward", lambda **kw: (read.append(kw["input_ids"].numel()), forward(**kw))[1]
    )
    slates = [Slate(query, CANDIDATES[0]) for query in QUERIES]
    packed = layout.pack(QUERIES, CANDIDATES[0])
    cost = sum((answer.cost for answer in stored.yes(slates)), Cost())
    assert read == [len(packed.tree.ids)]
    assert (cost.prompt_tokens, cost.reused_tokens) == (len(packed.tree.ids), len(packed.trunk))
    assert cost.requests == 4 and cost.seconds > 0


def test_level_slates_are_those_of_an_open_walk(monkeypatch):
    """A leaf beside the pages stays, and the slates are what a navigator that keeps everything asks about."""
    nodes = [*toy_corpus(3, 5), Node("lonely", None, "Lonely", "A page without sections.")]
    nodes.append(Node("p1s1x", "p1s1", "deep", "deeper than all others"))
    corpus = Corpus.from_nodes(nodes)
    model, layout = first(max_candidates=4)
    scorer = LocalScorer(model, layout)
    asked = []
    yes = scorer.yes
    monkeypatch.setattr(scorer, "yes", lambda slates: (asked.append([s.candidates for s in slates]), yes(slates))[1])
    Navigator(scorer, corpus, NavigateConfig(keep=[100], choose=0)).search(["where is jam?"])
    assert [level_slates(corpus, scorer, level) for level in range(3)] == asked
    assert [len(level) for level in asked] == [1, 4, 4]
    assert "lonely" in {c.id for slate in asked[1] for c in slate}
    with pytest.raises(ValueError, match="there is no level 4: with everything open a walk ends at level 3"):
        level_slates(corpus, scorer, 3)


@pytest.mark.parametrize(("head", "readout"), KINDS)
def test_a_walk_with_a_reopened_store(head, readout, tmp_path):
    model, layout = first(head, readout, max_candidates=7)
    corpus = toy_corpus()
    store_of(model, layout, tmp_path, corpus)
    store = StaticSlates.open(tmp_path / "store")
    assert len(store) == 4
    queries, config = ["where is jam?", "where is olive?", LONG], NavigateConfig(keep=[100], choose=3)
    plain = Navigator(LocalScorer(model, layout), corpus, config).search(queries)
    stored = Navigator(LocalScorer(model, layout, static=store), corpus, config).search(queries)
    for before, now in zip(plain, stored, strict=True):
        assert before.ids == now.ids
        np.testing.assert_allclose(before.scores, now.scores, atol=1e-6)
        assert before.cost.reused_tokens == 0
        assert now.trace[0].cost.reused_tokens > 0 and now.trace[1].cost.reused_tokens > 0
        assert now.trace[2].cost.reused_tokens == 0  # the final choice is nobody else's
    before, now = (sum((hits.cost for hits in some), Cost()) for some in (plain, stored))
    assert now.prompt_tokens < before.prompt_tokens * 0.8
    assert now.prompt_tokens + now.reused_tokens == before.prompt_tokens


def test_bfloat16_is_kept_as_it_is(tmp_path):
    model, layout = first()
    model.backbone.to(torch.bfloat16)
    store = store_of(model, layout, tmp_path)
    memory = store.get(next(iter(store.sizes)))
    assert memory.layers[0][0].dtype == torch.bfloat16 and memory.head.keys_SKH.dtype == torch.float32
    candidates = level_slates(toy_corpus(), LocalScorer(model, layout), 1)[0]
    slates = [Slate("where is jam?", candidates)]
    plain, stored = LocalScorer(model, layout).yes(slates), LocalScorer(model, layout, static=store).yes(slates)
    same(stored, plain, atol=1e-3)


def test_a_store_is_mapped_not_read(tmp_path):
    store = store_of(*first(), tmp_path)
    key = next(iter(store.sizes))
    memory = store.get(key)
    assert store.get(key) is memory
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("this system does not say what is mapped")
    assert f"{key}.safetensors" in maps.read_text()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.head.query.weight.data[0, 0].add_(1e-3), "model was [0-9a-f]{64} .* and is [0-9a-f]{64} here"),
        (lambda m: m.backbone.base_model.layers[1].mlp.up_proj.weight.data[3, 3].add_(1e-3), "model was"),
        (lambda m: m.backbone.config.rope_parameters.update(rope_theta=12345.0), "model was"),
        (lambda m: m.backbone.to(torch.bfloat16), "dtype was float32 when the slates were stored and is bfloat16 here"),
    ],
)  # fmt: skip
def test_another_model_is_refused(tmp_path, change, named):
    model, layout = first()
    store = store_of(model, layout, tmp_path)
    LocalScorer(model, layout, static=store)
    with torch.no_grad():
        change(model)
    with pytest.raises(StaticError, match=named):
        LocalScorer(model, layout, static=store)


@pytest.mark.parametrize(
    ("decision", "named"),
    [
        ({"instruction": "plain"}, "decision.instruction was navigate when .* and is plain here"),
        ({"max_brief_tokens": 23}, "decision.max_brief_tokens was 24 when .* and is 23 here"),
    ],
)
def test_another_prompt_is_refused(tmp_path, decision, named):
    store = store_of(*first(), tmp_path)
    with pytest.raises(StaticError, match=named):
        LocalScorer(*first(**decision), static=store)


def test_a_changed_word_of_the_prompt_is_refused(tmp_path):
    store = store_of(*first(), tmp_path)
    made_with = {**store.made_with, "prompt.sha256": "0" * 64}
    with pytest.raises(StaticError, match="prompt.sha256 was 0{64} when .* and is [0-9a-f]{64} here"):
        LocalScorer(*first(), static=StaticSlates(store.path, made_with, store.sizes))


def test_another_corpus_is_refused(tmp_path):
    store = store_of(*first(), tmp_path)
    store.check_corpus(toy_corpus())
    other = toy_corpus(5)
    with pytest.raises(StaticError, match=f"corpus was {toy_corpus().fingerprint} .* and is {other.fingerprint} here"):
        store.check_corpus(other)


def test_changed_candidates_are_read_again(tmp_path):
    """Even where nobody compares the corpus: a memory belongs to the tokens of its trunk."""
    model, layout = first()
    store = store_of(model, layout, tmp_path)
    candidates = level_slates(toy_corpus(), LocalScorer(model, layout), 1)[0]
    changed = (replace(candidates[0], text="something else"), *candidates[1:])
    for some, reused in ((candidates, True), (changed, False), (candidates[::-1], False)):
        [plain] = LocalScorer(model, layout).yes([Slate("jam?", some)])
        [stored] = LocalScorer(model, layout, static=store).yes([Slate("jam?", some)])
        same([stored], [plain])
        assert (stored.cost.reused_tokens > 0) == reused


def test_query_first_and_partial_attention_are_refused():
    model, layout = tiny_decision(order="query_first")
    with pytest.raises(ValueError, match="with decision.order=query_first .* nothing of them can be stored"):
        LocalScorer(model, layout, trunk_cache_bytes=1)
    with pytest.raises(ValueError, match="with decision.order=query_first"):
        plan_static(LocalScorer(model, layout), toy_corpus(), 1)
    model, layout = first()
    model.backbone.config.sliding_window = 8
    with pytest.raises(ValueError, match=r"llama has layers without full attention \(sliding_window\), which keep"):
        LocalScorer(model, layout, trunk_cache_bytes=1)


def test_fingerprint_changes_with_every_parameter():
    model, _ = first()
    before = model_fingerprint(model)
    assert model_fingerprint(first()[0]) == before
    for name, parameter in model.named_parameters():
        value = parameter.detach().flatten()[0].item()
        parameter.data.view(-1)[0] = value + 1
        assert model_fingerprint(model) != before, name
        parameter.data.view(-1)[0] = value
    assert model_fingerprint(model) == before
