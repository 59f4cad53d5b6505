"""Static slates: what was read once answers as if it were read again; what does not fit is refused."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decision_rows import build, row_by_row
from decision_toy import shake, tiny_decision, toy_corpus
from fakes import make_slate

from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.hits import Cost
from retrail.models.config import NavigateConfig
from retrail.models.decision import static_build
from retrail.models.decision.batch import SlateBatch
from retrail.models.decision.navigate import Navigator
from retrail.models.decision.scorer import LocalScorer
from retrail.models.decision.static import MANIFEST, UNFINISHED, StaticError, StaticSlates, model_fingerprint
from retrail.models.decision.static_build import build_static, level_slates, plan_static
from retrail.models.decision.trunks import TrunkCache, TrunkMemory, trunk_key
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


def test_sizes_are_those_that_were_planned(tmp_path):
    for head, readout in KINDS:
        model, layout = first(head, readout)
        scorer, corpus = LocalScorer(model, layout), toy_corpus()
        plan = plan_static(scorer, corpus, 2)
        store = build_static(scorer, corpus, plan, tmp_path / head / readout)
        assert plan.kept and not plan.left_out
        for slate in plan.kept:
            assert store.get(slate.key).num_bytes == slate.num_bytes
            assert 0 < store.sizes[slate.key] - slate.num_bytes < 4000
        assert plan.num_bytes == sum(slate.num_bytes for slate in plan.kept)


def test_the_cap_keeps_upper_levels(tmp_path):
    model, layout = first(max_candidates=6)
    scorer, corpus = LocalScorer(model, layout), toy_corpus()
    whole = plan_static(scorer, corpus, 2)
    assert [slate.level for slate in whole.kept] == [0, 1, 1, 1]
    cap = sum(slate.num_bytes for slate in whole.kept[:2])
    plan = plan_static(scorer, corpus, 2, cap)
    assert (plan.kept, plan.left_out) == (whole.kept[:2], whole.kept[2:])
    assert len(plan_static(scorer, corpus, 2, cap - 1).kept) == 1
    first_line, second_line = plan.lines()
    assert first_line.startswith("level 1: 1 slates, 4 candidates, 0.") and "do not fit" not in first_line
    assert "level 2: 1 slates" in second_line and "2 more (" in second_line and "do not fit max_gb" in second_line
    store = build_static(scorer, corpus, plan, tmp_path / "store")
    assert len(store) == 2 and json.loads((store.path / MANIFEST).read_text())["levels"] == [1, 1]
    with pytest.raises(ValueError, match="max_gb is too small for the first slate, which takes .* GB"):
        build_static(scorer, corpus, plan_static(scorer, corpus, 2, 10), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_known_beforehand(tmp_path, monkeypatch):
    model, layout = first()
    free = static_build.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(static_build.shutil, "disk_usage", lambda path: free)
    with pytest.raises(OSError, match="the slates need .* GB and the disk has 1e-06 GB left; set max_gb or levels"):
        store_of(model, layout, tmp_path)


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


def test_a_cut_or_missing_file_is_refused(tmp_path):
    store = store_of(*first(), tmp_path)
    file = store.path / f"{next(iter(store.sizes))}.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(StaticError, match=f"has {len(whole) - 10:,} bytes instead of {len(whole):,}: it was cut off"):
        StaticSlates.open(store.path)
    file.write_bytes(b"\xff" * len(whole))
    with pytest.raises(StaticError, match="safetensors: damaged"):
        StaticSlates.open(store.path).get(file.stem)
    file.unlink()
    with pytest.raises(StaticError, match="safetensors is missing"):
        StaticSlates.open(store.path)


def test_folders_that_hold_no_store(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere has no static slates: there is no such folder"):
        StaticSlates.open(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="it holds no manifest.json; make them with `retrail static`"):
        StaticSlates.open(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": "retrail-corpus"}')
    with pytest.raises(StaticError, match="is not the manifest of static slates"):
        StaticSlates.open(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": "retrail-static-slates", "format_version": 9}')
    with pytest.raises(StaticError, match="format_version is 9, this version reads 1"):
        StaticSlates.open(tmp_path)


def test_nothing_is_built_over_other_files(tmp_path):
    model, layout = first()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and holds no static slates; choose another name"):
        store_of(model, layout, tmp_path)
    (tmp_path / "store" / "notes.txt").unlink()
    store_of(model, layout, tmp_path)
    with pytest.raises(FileExistsError, match="holds static slates already; remove it or choose another name"):
        store_of(model, layout, tmp_path)


CHILD = """
    import os, signal, sys
    from pathlib import Path
    from decision_toy import tiny_decision, toy_corpus
    from retrail.models.decision import static_build
    from retrail.models.decision.scorer import LocalScorer

    model, layout = tiny_decision(order="candidates_first", max_candidates=5)
    scorer, corpus = LocalScorer(model, layout), toy_corpus()
    count, save = [0], static_build.save_file

    def dying(tensors, path):
        count[0] += 1
        if count[0] == 3:  # in the middle of the third file
            Path(path).write_bytes(b"half of a file")
            os.kill(os.getpid(), signal.SIGKILL)
        save(tensors, path)

    static_build.save_file = dying
    static_build.build_static(scorer, corpus, static_build.plan_static(scorer, corpus, 2), sys.argv[1])
"""


def test_a_killed_build_goes_on(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    helpers = str(Path(__file__).resolve().parents[2] / "helpers")
    path = os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(folder)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert len(list(folder.glob("*.safetensors"))) == 2 and len(list(folder.glob(".*.tmp"))) == 1
    with pytest.raises(StaticError, match="its build did not end; the same `retrail static` goes on with it"):
        StaticSlates.open(folder)
    other, layout = tiny_decision(order="candidates_first", max_candidates=5, max_brief_tokens=20)
    corpus = toy_corpus()
    with pytest.raises(StaticError, match="max_brief_tokens was 24 when the slates were stored and is 20 here"):
        build_static(LocalScorer(other, layout), corpus, plan_static(LocalScorer(other, layout), corpus, 2), folder)
    model, layout = tiny_decision(order="candidates_first", max_candidates=5)
    scorer = LocalScorer(model, layout)
    written = []
    save = static_build.save_file
    monkeypatch.setattr(static_build, "save_file", lambda tensors, path: (written.append(path), save(tensors, path)))
    store = build_static(scorer, corpus, plan_static(scorer, corpus, 2), folder)
    assert len(store) == 5 and len(written) == 3
    names = {file.name for file in folder.iterdir()}
    assert names == {MANIFEST, *(f"{key}.safetensors" for key in store.sizes)}
    fresh = build_static(scorer, corpus, plan_static(scorer, corpus, 2), tmp_path / "fresh")
    for file in fresh.path.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_a_build_with_fewer_levels_drops_what_it_does_not_hold(tmp_path, monkeypatch):
    model, layout = first(max_candidates=5)
    scorer, corpus, folder = LocalScorer(model, layout), toy_corpus(), tmp_path / "store"
    monkeypatch.setattr(static_build, "tqdm", lambda **kw: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_static(scorer, corpus, plan_static(scorer, corpus, 2), folder)
    monkeypatch.undo()
    (folder / ("0" * 64 + ".safetensors")).write_bytes(b"")
    assert (folder / UNFINISHED).is_file()
    store = build_static(scorer, corpus, plan_static(scorer, corpus, 1), folder)
    assert len(store) == 1 and len(list(folder.iterdir())) == 2


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


def memory_of(num_bytes):
    return TrunkMemory((), torch.zeros(num_bytes, dtype=torch.uint8))


def test_cache_lets_go_of_what_was_not_used_for_longest():
    cache = TrunkCache(100)
    for key in "ab":
        cache.put(key, memory_of(40))
    assert cache.get("a") is not None  # so b is the oldest now
    cache.put("c", memory_of(60))
    assert cache.get("b") is None and cache.get("a") is not None and cache.get("c") is not None
    assert cache.num_bytes == 100
    cache.put("huge", memory_of(101))
    assert cache.get("huge") is None and cache.num_bytes == 100
    cache.put("a", memory_of(40))
    assert cache.num_bytes == 100
    assert not cache.returns("x") and cache.returns("x")


def test_candidates_that_come_back_are_read_twice_and_no_more():
    model, layout = first()
    plain, cached = LocalScorer(model, layout), LocalScorer(model, layout, trunk_cache_bytes=10**6)
    trunk = len(layout.pack(["?"], CANDIDATES[0]).trunk)
    costs = []
    for query in QUERIES:
        slates = [Slate(query, CANDIDATES[0]), Slate(query, make_slate(2, seed=len(query)).candidates)]
        answers = cached.yes(slates)
        same(answers, plain.yes(slates))
        costs.append(answers[0].cost)
        assert answers[1].cost.reused_tokens == 0
    assert [cost.reused_tokens for cost in costs] == [0, 0, trunk, trunk]
    assert costs[1].prompt_tokens > trunk > costs[2].prompt_tokens
    assert cached._cache.num_bytes == cached._cache.get(trunk_key(layout.pack(["?"], CANDIDATES[0]))).num_bytes
