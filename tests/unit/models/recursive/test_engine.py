"""Searches against a plain recursive twin of their rules, over random corpora and all settings."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recursive_fakes import HashEncoder

from retrail.models.protocols import State
from retrail.models.recursive.engine import Engine, Request
from retrail.models.recursive.index import DocumentIndex
from retrail.models.recursive.search import (
    AdaptiveSearch,
    JointFeedback,
    TreeSearch,
    beam,
    breadth,
    chain,
    dense,
    doc_as_query,
)

TAU = 0.05


def make(texts, **options):
    encoder = HashEncoder()
    index = DocumentIndex.build([f"d{n}" for n in range(len(texts))], texts, encoder)
    return encoder, Engine(encoder, index, lambda row: texts[row], temperature=TAU, **options)


def column(encoder, texts, vector):
    """All scores of a vector, each by itself."""
    found = []
    for text in texts:
        own = encoder.encode_documents([text])[0]
        found.append(float(np.float32(sum(float(a) * float(b) for a, b in zip(vector, own, strict=True)))))
    return found


def twin(encoder, texts, request, search, K):  # noqa: C901 - the rules, one after the other
    """(states, proposals) as dictionaries, straight from the rules."""
    states, proposals = [], []
    used = set(request.excluded)

    def form(observed, level, parent, cum, total, logp):
        if search.observe == "document" and observed:
            vector = encoder.encode_documents([texts[observed[-1]]])[0]
        else:
            role = "continuation" if observed else "root"
            state = State(request.query, tuple(texts[d] for d in observed), role, request.instruction)
            vector = encoder.vector(state)
        scores = column(encoder, texts, vector)
        allowed = [d for d in range(len(texts)) if d not in request.excluded]
        top = sorted(allowed, key=lambda d: (-scores[d], d))[:K]
        weights = [math.exp(scores[d] / TAU) for d in top]
        p = {d: w / sum(weights) for d, w in zip(top, weights, strict=True)}
        states.append({"observed": observed, "level": level, "parent": parent, "cum": cum, "top": top, "p": p,
                       "sum": total, "logp": logp, "low": min(scores, default=0), "high": max(scores, default=0),
                       "scores": scores})  # fmt: skip
        return len(states) - 1

    frontier = [form((), 1, None, 1.0, 0.0, 0.0)]
    for level in range(1, search.depth + 1):
        made = []
        for s in frontier:
            state = states[s]
            b = search.branching
            if level == 1 and search.root_branching is not None:
                b = search.root_branching
            options = [d for d in state["top"] if search.dedup == "none" or b == 0 or d not in used]
            for d in options if b == 0 else options[:b]:
                v = state["scores"][d]
                if search.path_score == "minmax":
                    v = (v - state["low"]) / (state["high"] - state["low"] + 1e-12)
                made.append({"document": d, "parent": s, "level": level, "path": (*state["observed"], d), "score": v,
                             "cum": state["cum"] * v, "sum": state["sum"] + v,
                             "logp": state["logp"] + math.log(max(state["p"][d], 1e-300))})  # fmt: skip
                if search.dedup == "sequential":
                    used.add(d)
        if search.dedup == "level":
            merged = {}
            for one in made:
                if one["document"] not in merged or one["cum"] > merged[one["document"]]["cum"]:
                    merged[one["document"]] = one
            made = list(merged.values())
            used |= {one["document"] for one in made}
        proposals += made
        if level == search.depth:
            break
        kept = made
        if search.beam is not None:
            best = sorted(made, key=lambda one: -one["cum"])[: search.beam]
            kept = [one for one in made if any(one is other for other in best)]
        frontier = [form(one["path"], level + 1, one["parent"], one["cum"], one["sum"], one["logp"]) for one in kept]
        for one in made:
            one["kept"] = any(one is other for other in kept)
    return states, proposals


def compare(traversal, states, proposals):
    assert [s.observed for s in traversal.states] == [s["observed"] for s in states]
    for found, wanted in zip(traversal.states, states, strict=True):
        assert (found.level, found.parent) == (wanted["level"], wanted["parent"])
        assert found.candidates_K.tolist() == wanted["top"]
        assert found.scores_K == pytest.approx([wanted["scores"][d] for d in wanted["top"]], abs=1e-6)
        assert found.path_score == pytest.approx(wanted["cum"], rel=1e-5, abs=1e-8)
    assert len(traversal.proposals) == len(proposals)
    for found, wanted in zip(traversal.proposals, proposals, strict=True):
        assert (found.document, found.parent, found.level, found.path) == (
            wanted["document"], wanted["parent"], wanted["level"], wanted["path"],
        )  # fmt: skip
        values = [wanted[key] for key in ("score", "cum", "sum", "logp")]
        assert [found.score, found.cum, found.path_sum, found.logp] == pytest.approx(values, rel=1e-4, abs=1e-6)
        assert found.kept == wanted.get("kept", False)


searches = st.builds(
    TreeSearch,
    depth=st.integers(1, 4),
    branching=st.integers(1, 3),
    root_branching=st.one_of(st.none(), st.integers(1, 4)),
    dedup=st.sampled_from(["level", "none", "sequential"]),
    beam=st.one_of(st.none(), st.integers(1, 3)),
    path_score=st.sampled_from(["raw", "minmax"]),
    observe=st.sampled_from(["text", "document"]),
)


@settings(max_examples=120, deadline=None)
@given(search=st.one_of(searches, st.just(dense())), data=st.data())
def test_equals_the_rules(search, data):
    count = data.draw(st.integers(1, 14))
    texts = [data.draw(st.sampled_from(["", "same", "文書"] + [f"text {n}" for n in range(12)])) for _ in range(count)]
    encoder, engine = make(texts, candidate_k=data.draw(st.integers(1, 16)), batch_size=data.draw(st.integers(1, 3)))
    requests = [
        Request(f"query {n}", data.draw(st.sampled_from([None, "find it"])),
                tuple(data.draw(st.sets(st.integers(0, count - 1), max_size=count))))
        for n in range(data.draw(st.integers(1, 4)))
    ]  # fmt: skip
    for traversal, request in zip(engine.run(requests, search), requests, strict=True):
        compare(traversal, *twin(encoder, texts, request, search, engine.candidate_k))


TEXTS = [f"document {n}" for n in range(300)]


def test_state_counts():
    _, engine = make(TEXTS)
    [tree] = engine.run([Request("q")], TreeSearch(4, 3, dedup="none"))
    assert len(tree.states) == 1 + 3 + 9 + 27 and len(tree.proposals) == 3 + 9 + 27 + 81
    [merged] = engine.run([Request("q")], TreeSearch(4, 3))
    documents = [p.document for p in merged.proposals]
    assert len(documents) == len(set(documents))
    [one] = engine.run([Request("q")], chain(4))
    assert [s.level for s in one.states] == [1, 2, 3, 4] and len(one.proposals) == 4
    [wide] = engine.run([Request("q")], breadth(8))
    assert len(wide.states) == 1 + 8
    [beamed] = engine.run([Request("q")], beam(5))
    assert len(beamed.states) == 1 + 3 * 5 and sum(p.kept for p in beamed.proposals) == 3 * 5
    [flat] = engine.run([Request("q")], dense())
    assert len(flat.states) == 1 and [p.document for p in flat.proposals] == flat.states[0].candidates_K.tolist()


def test_documents_as_queries_are_not_encoded():
    encoder, engine = make(TEXTS)
    [traversal] = engine.run([Request("q")], doc_as_query(3, 2, dedup="none"))
    assert encoder.calls == [1] and [s.role for s in traversal.states] == ["root"] + ["document"] * 6
    for state in traversal.states[1:]:
        assert np.array_equal(state.vector_D, engine.index.vectors([state.observed[-1]])[0])
        assert state.cost.prompt_tokens == 0


def test_joint_feedback():
    encoder, engine = make(TEXTS)
    [traversal] = engine.run([Request("q", excluded=(4, 5))], JointFeedback(3))
    root, state = traversal.states
    assert state.observed == tuple(root.candidates_K[:3].tolist()) and not {4, 5} & set(state.observed)
    assert (state.role, state.level, state.parent) == ("feedback", 2, 0)
    assert not traversal.realised and traversal.proposals == ()
    texts = tuple(TEXTS[d] for d in state.observed)
    assert np.array_equal(state.vector_D, encoder.vector(State("q", texts, "feedback")))


def test_recovery_view_is_of_every_proposal_and_changes_nothing():
    encoder, engine = make(TEXTS[:40])
    requests = [Request("q", "find", excluded=(1, 2)), Request("other")]
    traversals = engine.run(requests, beam(3, 3))
    for traversal, view in zip(traversals, engine.form_view(traversals), strict=True):
        assert len(view) == len(traversal.proposals)
        for state, proposal in zip(view, traversal.proposals, strict=True):
            texts = tuple(TEXTS[d] for d in proposal.path)
            assert (state.role, state.level, state.parent) == ("recovery_view", proposal.level + 1, proposal.parent)
            wanted = encoder.vector(State(traversal.query, texts, "recovery_view", traversal.instruction))
            assert np.array_equal(state.vector_D, wanted)
            scores = column(encoder, TEXTS[:40], wanted)
            assert (state.low, state.high) == (pytest.approx(min(scores)), pytest.approx(max(scores)))
            assert not set(traversal.excluded) & set(state.candidates_K.tolist())


@pytest.mark.parametrize("search", [TreeSearch(3, 2), beam(2, 3), JointFeedback(2), dense(), doc_as_query(3, 2)])
def test_nothing_depends_on_batches(search):
    requests = [Request(f"q{n}", excluded=(n,)) for n in range(7)]
    runs = []
    for batch_size, inflight in ((1, 1), (3, 2), (2, 4), (100, 1)):
        encoder, engine = make(TEXTS[:50], batch_size=batch_size, inflight=inflight)
        runs.append(engine.run(requests, search))
        assert sorted(encoder.forgotten) == list(range(7))
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            assert one.proposals == other.proposals and len(one.states) == len(other.states)
            for a, b in zip(one.states, other.states, strict=True):
                assert (a.observed, a.level, a.parent, a.path_score) == (b.observed, b.level, b.parent, b.path_score)
                assert np.array_equal(a.candidates_K, b.candidates_K) and np.array_equal(a.scores_K, b.scores_K)


def test_a_level_of_a_batch_is_encoded_at_once():
    encoder, engine = make(TEXTS, batch_size=10)
    engine.run([Request(f"q{n}") for n in range(4)], TreeSearch(3, 2, dedup="none"))
    assert encoder.calls == [4, 8, 16]


def test_all_documents_excluded():
    _, engine = make(TEXTS[:5])
    for search in (TreeSearch(3, 2), JointFeedback(2), dense()):
        [traversal] = engine.run([Request("q", excluded=(0, 1, 2, 3, 4))], search)
        assert len(traversal.states) == 1 and len(traversal.states[0].candidates_K) == 0
        assert traversal.proposals == ()


def test_no_queries_and_no_documents():
    _, engine = make([])
    assert engine.run([], TreeSearch()) == []
    [traversal] = engine.run([Request("q")], TreeSearch())
    assert len(traversal.states) == 1 and traversal.proposals == ()


def test_an_error_of_the_index_is_raised():
    _, engine = make(TEXTS[:5])
    engine.index.search = lambda *args, **kwargs: (_ for _ in ()).throw(FloatingPointError("broken"))
    with pytest.raises(FloatingPointError, match="broken"):
        engine.run([Request("q")], TreeSearch())


def margin_of(state, used):
    scores = [score for row, score in zip(state.candidates_K, state.scores_K, strict=True) if row not in used]
    return scores[0] - scores[1]


def test_adaptive_widens_only_where_it_is_unsure():
    _, engine = make(TEXTS)
    [whole] = engine.run([Request("q")], TreeSearch(2, 3))
    [never] = engine.run([Request("q")], AdaptiveSearch(2, 3, widen_margin=None))
    assert [s.observed for s in never.states] == [s.observed for s in whole.states]
    margin = float(margin_of(whole.states[0], set()))
    [sure] = engine.run([Request("q")], AdaptiveSearch(2, 3, widen_margin=margin))
    assert len([p for p in sure.proposals if p.level == 1]) == 1
    [unsure] = engine.run([Request("q")], AdaptiveSearch(2, 3, widen_margin=margin + 1e-6))
    assert len([p for p in unsure.proposals if p.level == 1]) == 3


def test_adaptive_stops_where_nothing_new_comes():
    _, engine = make(TEXTS)
    [whole] = engine.run([Request("q")], AdaptiveSearch(3, 2, widen_margin=None))
    shares = []
    for state in whole.states[1:]:
        own, its = state.candidates_K[:10], whole.states[state.parent].candidates_K[:10]
        shares.append(len(set(own) & set(its)) / 10)
    limit = sorted(shares[:2])[1]  # of the second level, one stops
    [stopped] = engine.run([Request("q")], AdaptiveSearch(3, 2, widen_margin=None, stop_overlap=limit))
    parents = {p.parent for p in stopped.proposals if p.level == 2}
    assert parents == {n for n in (1, 2) if shares[n - 1] < limit}
    entropies = []
    for state in whole.states[:1]:
        p = np.exp(np.asarray(state.scores_K, float) / TAU)
        p /= p.sum()
        entropies.append(float(-(p * np.log(p)).sum() / np.log(len(p))))
    [none] = engine.run([Request("q")], AdaptiveSearch(3, 2, stop_entropy=entropies[0] - 1e-9))
    assert len(none.states) == 1 and none.proposals == ()


def test_adaptive_caps():
    _, engine = make(TEXTS)
    open_tree = {"widen_margin": None, "dedup": "none"}
    [states] = engine.run([Request("q")], AdaptiveSearch(3, 3, max_states=6, **open_tree))
    assert len(states.states) == 6 and states.notes == ("level 3 forms 2 of 9 states (max_states=6)",)
    second = [p for p in states.proposals if p.level == 2]
    best = sorted(second, key=lambda p: -p.cum)[:2]
    assert {p.path for p in second if p.kept} == {p.path for p in best} == {s.observed for s in states.states[4:]}
    # 10 tokens of the root and 20 of each of three: 70.
    [tokens] = engine.run([Request("q")], AdaptiveSearch(3, 3, max_tokens=70, **open_tree))
    assert len(tokens.states) == 4 and tokens.notes == ("stopped after level 2: 70 of max_tokens=70 are spent",)
    assert sum(p.kept for p in tokens.proposals) == 3
    [time] = engine.run([Request("q")], AdaptiveSearch(3, 3, max_ms=1e-6, **open_tree))
    assert len(time.states) == 1 and "max_ms" in time.notes[0] and len(time.proposals) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidate_k": 0}, "candidate_k=0 must be 1 or more"),
        ({"batch_size": 0}, "batch_size=0 must be 1 or more"),
        ({"inflight": 0}, "inflight=0 must be 1 or more"),
    ],
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        make(TEXTS[:3], **options)


def test_costs_are_those_of_the_states():
    _, engine = make(TEXTS)
    [traversal] = engine.run([Request("q")], TreeSearch(2, 2, dedup="none"))
    assert [s.cost.prompt_tokens for s in traversal.states] == [10, 20, 20]
    assert traversal.cost.prompt_tokens == 50 and traversal.cost.forwards == 3
    assert all(0 < s.search_seconds <= s.cost.seconds for s in traversal.states)
