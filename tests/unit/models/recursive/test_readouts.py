"""Readouts by hand, and against plain dictionaries over random traversals."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recursive_fakes import HashEncoder

from retrail.models.recursive.engine import Engine, Request
from retrail.models.recursive.index import DocumentIndex
from retrail.models.recursive.readouts.base import Ranking, Readout
from retrail.models.recursive.readouts.fusion import RRF, Borda, PostOrderRRF
from retrail.models.recursive.readouts.global_readout import CombMNZ, GlobalReadout, MaxOverStates
from retrail.models.recursive.readouts.realised import ChainOrder, PathProduct, RootReadout, SelectedSet, StateReadout
from retrail.models.recursive.readouts.registry import READOUTS, make_readout
from retrail.models.recursive.readouts.views import z_agreement
from retrail.models.recursive.search import JointFeedback, TreeSearch, beam, chain, dense
from retrail.models.recursive.traversal import Proposal, StateRecord, Traversal

TAU = 0.05


def state(level, parent, observed, scores, path_score=1.0, low=-1.0, high=1.0):
    """A state from {row: score}, whose candidates are sorted as searches leave them."""
    order = sorted(scores, key=lambda row: (-scores[row], row))
    return StateRecord(
        role="root" if parent is None else "continuation",
        level=level,
        parent=parent,
        observed=observed,
        path_score=path_score,
        candidates_K=np.array(order, np.int64),
        scores_K=np.array([scores[row] for row in order], np.float32),
        vector_D=np.array([1.0, 0.0], np.float32),
        low=low,
        high=high,
    )


# ln 2 * tau: a difference of one of these doubles p.
H = TAU * math.log(2)
ROOT = state(1, None, (), {5: 0.0, 3: H, 8: H})  # p: 3 and 8 have 2/5, 5 has 1/5
FIRST = state(2, 0, (3,), {8: 2 * H, 9: 0.0}, 0.5)  # 4/5, 1/5
SECOND = state(2, 0, (8,), {9: 0.0, 3: 0.0}, 0.25)  # 1/2, 1/2
PROPOSALS = (
    Proposal(3, 0, 1, (3,), 0.5, 0.5, 0.5, math.log(0.4), True),
    Proposal(8, 0, 1, (8,), 0.25, 0.25, 0.25, math.log(0.4), True),
    Proposal(8, 1, 2, (3, 8), 0.8, 0.4, 1.3, math.log(0.32), False),
    Proposal(9, 2, 2, (8, 9), -1.0, -0.25, -0.75, math.log(0.2), False),
)
BY_HAND = Traversal("q", None, "by hand", 200, TAU, (ROOT, FIRST, SECOND), PROPOSALS)


@pytest.mark.parametrize(
    ("readout", "rows", "scores"),
    [
        # Level 1: 3 .4, 8 .4, 5 .2; level 2 (mean of two): 8 .4, 9 .1 + .25, 3 .25.
        (GlobalReadout(), [8, 3, 9, 5], [0.4, 0.325, 0.175, 0.1]),
        (GlobalReadout(level_balanced=False), [8, 3, 9, 5], [1.2 / 3, 0.9 / 3, 0.7 / 3, 0.2 / 3]),
        (GlobalReadout(include_root=False), [8, 9, 3], [0.4, 0.35, 0.25]),
        (GlobalReadout(levels=(1,)), [3, 8, 5], [0.4, 0.4, 0.2]),
        (GlobalReadout(restrict_to_selected=True), [8, 3, 9], [0.4, 0.325, 0.175]),
        (GlobalReadout(restrict_to_selected=True, levels=(2,), backfill_root=True), [8, 9, 3, 5], None),
        (GlobalReadout(normalization="raw"), [8, 3, 5, 9], [H / 2 + 2 * H / 4, H / 2, 0, 0]),
        # Own min-max: root 3 1, 8 1, 5 0; first 8 1, 9 0; second all 0.
        (GlobalReadout(normalization="minmax"), [8, 3, 5, 9], [0.75, 0.5, 0, 0]),
        (GlobalReadout(normalization="minmax_full", levels=(1,)), [3, 8, 5], [(H + 1) / 2, (H + 1) / 2, 0.5]),
        (RootReadout(), [3, 8, 5], [H, H, 0]),
        (PathProduct(), [3, 8, 9], [0.5, 0.4, -0.25]),
        (PathProduct(clipped=True), [3, 8, 9], [0.5, 0.4, 0]),
        (PathProduct(backfill_root=True), [3, 8, 9, 5], None),
        (ChainOrder("logprob"), [3, 8, 9], None),
        (ChainOrder("product"), [3, 8, 9], None),
        (ChainOrder("sum", backfill_root=True), [3, 8, 9, 5], None),
        (SelectedSet(), [3, 8, 9], None),
        (StateReadout(), [8, 9], [2 * H, 0]),
        (StateReadout(level=1), [3, 8, 5], [H, H, 0]),
        (StateReadout(backfill_root=True), [8, 9, 3, 5], None),
        (MaxOverStates(), [8, 3, 9, 5], [0.8, 0.5, 0.5, 0.2]),
        # Ranks: 3: 1 and 1, 8: 2 and 1, 9: 2 and 2 (3 stands before 9 in the second), 5: 3.
        (RRF(), [3, 8, 9, 5], [2 / 61, 1 / 62 + 1 / 61, 2 / 62, 1 / 63]),
        (RRF(10, level_balanced=True), [3, 8, 9, 5],
         [1 / 22 + 1 / 44, 1 / 24 + 1 / 44, 2 / 48, 1 / 26]),
        (Borda(), [3, 8, 9, 5], [3 + 2, 2 + 2, 1 + 1, 1]),
        (CombMNZ(), [8, 3, 9, 5], [0.8, 0.65, 0.35, 0.1]),
        (CombMNZ(level_balanced=False), [8, 3, 9, 5], [2.4 / 3, 1.8 / 3, 1.4 / 3, 0.2 / 3]),
        (PostOrderRRF(), [3, 8, 9, 5], [2 / 61, 1 / 62 + 1 / 61, 2 / 62, 1 / 63]),
    ],
)  # fmt: skip
def test_by_hand(readout, rows, scores):
    ranking = readout.rank(BY_HAND, None)
    if scores is None:
        assert ranking.rows.tolist() == rows and ranking.scores is None
        return
    assert ranking.rows.tolist() == rows
    assert ranking.scores == pytest.approx(scores, abs=1e-7)


def test_post_order_is_children_first():
    lists = [[1, 2], [3, 1], [4], [5]]
    states = [state(1, None, (), {1: 0.9, 2: 0.8}), state(2, 0, (1,), {3: 0.9, 1: 0.8}),
              state(2, 0, (2,), {4: 0.9}), state(3, 1, (1, 3), {5: 0.9})]  # fmt: skip
    traversal = Traversal("q", None, "s", 200, TAU, tuple(states), ())
    inner = {}  # fused(1) = RRF of its own list and its child's
    for ranks in (lists[1], lists[3]):
        for n, row in enumerate(ranks):
            inner[row] = inner.get(row, 0) + 1 / (60 + n + 1)
    order = sorted(inner, key=lambda row: (-inner[row], row))
    assert order == [3, 5, 1]
    outer = {}
    for ranks in (lists[0], order, lists[2]):
        for n, row in enumerate(ranks):
            outer[row] = outer.get(row, 0) + 1 / (60 + n + 1)
    found = PostOrderRRF().rank(traversal, None)
    assert found.rows.tolist() == sorted(outer, key=lambda row: (-outer[row], row))
    assert found.scores == pytest.approx([outer[row] for row in found.rows])


def test_z_agreement_by_hand():
    one = Ranking(np.array([4, 2, 7]), np.array([3.0, 2.0, 1.0]))  # z: 1, 0, -1
    other = Ranking(np.array([2, 9]), np.array([5.0, 3.0]))  # z: 1/sqrt 2, -1/sqrt 2; the others get the least
    found = z_agreement([one, other], [1.0, 2.0])
    r = math.sqrt(2)
    wanted = {4: 1 - r, 2: 0 + r, 7: -1 - r, 9: -1 - r}
    assert found.rows.tolist() == [2, 4, 7, 9] and found.scores == pytest.approx([wanted[x] for x in found.rows])
    single = Ranking(np.array([4]), np.array([3.0]))
    flat = Ranking(np.array([2, 4]), np.array([1.0, 1.0]))
    assert z_agreement([single, flat], [1, 1]).scores.tolist() == [0, 0]


# What follows compares with dictionaries, over real searches of a hash encoder.


def p_of(record, scaled=None):
    scores = record.scores_K.tolist() if scaled is None else scaled
    weights = [math.exp(score / TAU) for score in scores]
    return dict(zip(record.candidates_K.tolist(), [w / sum(weights) for w in weights], strict=True)) if weights else {}


def levels_of(states):
    found = {}
    for record in states:
        found.setdefault(record.level, []).append(record)
    return found


def twin_global(t, balanced=True, root=True):
    states = [s for s in t.states if root or s.level > 1]
    total = {}
    for members in levels_of(states).values():
        for record in members:
            weight = 1 / (len(levels_of(states)) * len(members)) if balanced else 1 / len(states)
            for row, p in p_of(record).items():
                total[row] = total.get(row, 0) + weight * p
    return total


def twin_recovery(t):
    total = {}
    view = t.views["recovery"]
    for record in view:
        scaled = [(s - record.low) / (record.high - record.low + 1e-12) for s in record.scores_K.tolist()]
        for row, p in p_of(record, scaled).items():
            total[row] = total.get(row, 0) + p / len(view)
    return total


def twin_rrf(t, balanced):
    total = {}
    for members in levels_of(t.states).values():
        for record in members:
            weight = 1 / (len(levels_of(t.states)) * len(members)) if balanced else 1
            for n, row in enumerate(record.candidates_K[:200].tolist()):
                total[row] = total.get(row, 0) + weight / (60 + n + 1)
    return total


def twin_borda(t):
    total = {}
    for record in t.states:
        for n, row in enumerate(record.candidates_K.tolist()):
            total[row] = total.get(row, 0) + len(record.candidates_K) - n
    return total


def twin_mnz(t):
    r = twin_global(t)
    return {row: value * sum(row in s.candidates_K for s in t.states) for row, value in r.items()}


def twin_max(t):
    total = {}
    for record in t.states:
        for row, p in p_of(record).items():
            total[row] = max(total.get(row, 0), p)
    return total


def twin_paths(t):
    total = {}
    for proposal in t.proposals:
        total[proposal.document] = max(total.get(proposal.document, -9e9), proposal.cum)
    return total


def twin_z(*parts):
    found, rows = {}, {row for part in parts for row in part}
    for part in parts:
        top = sorted(part, key=lambda row: (-part[row], row))[:200]
        values = [part[row] for row in top]
        mean = sum(values) / max(1, len(values))
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 1
        z = {row: (part[row] - mean) / (deviation or 1) if len(values) > 1 else 0.0 for row in top}
        for row in rows:
            found[row] = found.get(row, 0) + z.get(row, min(z.values(), default=0.0))
    return found


TWINS = {
    "global": twin_global,
    "combsum": lambda t: twin_global(t, balanced=False),
    "recovery": twin_recovery,
    "rrf": lambda t: twin_rrf(t, False),
    "rrf_level": lambda t: twin_rrf(t, True),
    "borda": twin_borda,
    "combmnz": twin_mnz,
    "max": twin_max,
    "path_product": twin_paths,
    "recovery_fusion": lambda t: twin_z(twin_global(t), twin_recovery(t)),
    "path_recovery_fusion": lambda t: twin_z(twin_paths(t), twin_recovery(t)),
}


def search(texts, search, requests, **options):
    encoder = HashEncoder()
    engine = Engine(encoder, DocumentIndex.build(texts, texts, encoder), lambda row: texts[row], **options)
    found = engine.run(requests, search, ranges=True)
    views = engine.form_view(found)
    return [Traversal(**{f: getattr(t, f) for f in t.__slots__} | {"views": {"recovery": v}})
            for t, v in zip(found, views, strict=True)]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_equal_their_twins(data):
    n = data.draw(st.integers(1, 30))
    texts = [f"text {i}" for i in range(n)]
    strategy = data.draw(
        st.sampled_from([TreeSearch(3, 2), TreeSearch(2, 3, dedup="none"), chain(3), beam(2, 3), dense()])
    )
    excluded = tuple(data.draw(st.sets(st.integers(0, n - 1), max_size=n)))
    [t] = search(texts, strategy, [Request(data.draw(st.text(max_size=5)), None, excluded)],
                 candidate_k=data.draw(st.integers(1, 40)))  # fmt: skip
    for name, twin in TWINS.items():
        wanted = twin(t)
        found = make_readout(name).rank(t, None)
        assert set(found.rows.tolist()) == set(wanted), name
        assert found.scores == pytest.approx([wanted[row] for row in found.rows.tolist()], rel=1e-6, abs=1e-9), name
        assert sorted(zip(-found.scores, found.rows, strict=True)) == list(zip(-found.scores, found.rows, strict=True))
        assert not set(excluded) & set(found.rows.tolist())


def test_one_state_is_its_softmax_and_its_list():
    [t] = search([f"t{n}" for n in range(50)], dense(), [Request("q")])
    root = t.states[0]
    assert make_readout("global").rank(t, None).scores == pytest.approx(list(p_of(root).values()))
    for name in ("root", "global", "path_product", "selected_set", "terminal", "rrf", "borda", "chain_order", "max"):
        assert make_readout(name).rank(t, None).rows.tolist() == root.candidates_K.tolist(), name


EXCLUDED = tuple(range(1, 60, 2))


@pytest.mark.parametrize("name", [n for n in READOUTS if n not in ("root_interpolation", "assembly", "z_agreement")])
def test_excluded_documents_never_come_back(name):
    texts = [f"t{n}" for n in range(60)]
    none, some = search(
        texts, TreeSearch(3, 2), [Request("q", excluded=tuple(range(60))), Request("q", excluded=EXCLUDED)]
    )
    readout = make_readout(
        name, {"backfill_root": True} if name in ("selected_set", "path_product", "terminal") else {}
    )
    assert len(readout.rank(none, None).rows) == 0
    found = readout.rank(some, None).rows.tolist()
    assert found and not set(EXCLUDED) & set(found) and len(found) == len(set(found))


@pytest.mark.parametrize("name", ["path_product", "sequence_sum", "probability_chain", "chain_order", "selected_set",
                                  "path_recovery_fusion"])  # fmt: skip
def test_paths_of_joint_feedback_are_refused(name):
    [t] = search([f"t{n}" for n in range(9)], JointFeedback(2), [Request("q")])
    assert make_readout(name).realised
    with pytest.raises(ValueError, match=r"reads the paths of a search, and JointFeedback\(documents=2\) makes none"):
        make_readout(name).rank(t, None)
    for other in ("global", "root", "terminal", "rrf"):
        assert len(make_readout(other).rank(t, None).rows) == 9


def test_what_cannot_be_read():
    with pytest.raises(ValueError, match=r"readout.level=7: this search formed no such level; it has: 1, 2"):
        StateReadout(level=7).rank(BY_HAND, None)
    with pytest.raises(ValueError, match="has no view 'recovery'"):
        make_readout("recovery").rank(BY_HAND, None)
    bare = Traversal("q", None, "s", 9, TAU, (state(1, None, (), {1: 0.5}, low=None, high=None),), ())
    with pytest.raises(ValueError, match="minmax_full needs each state's least and greatest score"):
        GlobalReadout(normalization="minmax_full").rank(bare, None)
    with pytest.raises(ValueError, match="an order without scores, which cannot be fused by score"):
        make_readout("z_agreement", {"parts": ["selected_set", "global"]}).rank(BY_HAND, None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("globl", {}, "readout='globl' is not a choice; use one of: global, combsum, root"),
        ("rrf", {"rank": 3}, "readout=rrf has no option 'rank'; it has: k, level_balanced"),
        ("rrf", {"k": 0}, "readout.k=0 must be above 0"),
        ("global", {"normalization": "soft"}, "readout.normalization='soft' is not a choice"),
        ("chain_order", {"score": "mean"}, "readout.score='mean' is not a choice"),
        ("root_interpolation", {"lam": 2}, "readout.lam=2 must be between 0 and 1"),
        ("z_agreement", {}, "readout=z_agreement also needs: parts"),
        ("z_agreement", {"parts": ["global"], "weights": [1, 2]}, "readout.weights has 2 values for 1 parts"),
        (RRF(), {"k": 3}, "belong to a readout that is named"),
    ],
)
def test_settings_that_cannot_be(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_readout(name, options)


def test_every_readout_is_one():
    for name in READOUTS:
        made = make_readout(name, {"parts": ["global", "root"]} if name == "z_agreement" else None)
        assert isinstance(made, Readout) and isinstance(made.views, tuple)


def test_chunks_become_documents():
    class Grouped:
        groups = np.array([0, 0, 0, 3, 3, 3, 6, 6, 6, 6])

    both = make_readout("z_agreement", {"parts": ["global", "global"], "group_reduce": ["max", "last"]})
    found = both.rank(BY_HAND, Grouped)
    # Documents 3 (rows 3, 5) and 6 (8, 9): best .325 and .4, lowest .1 and .175; z is -1/sqrt 2 and 1/sqrt 2 twice.
    assert found.rows.tolist() == [6, 3] and found.scores == pytest.approx([math.sqrt(2), -math.sqrt(2)])


def test_a_large_tree_is_read_in_a_millisecond():
    rng = np.random.default_rng(0)
    states = []
    for n in range(40):
        rows = rng.choice(10_000, 200, replace=False)
        states.append(
            state(1 + n % 4, None if n == 0 else 0, (n,), dict(zip(rows.tolist(), rng.random(200), strict=True)))
        )
    t = Traversal("q", None, "s", 200, TAU, tuple(states), ())
    readout = GlobalReadout()
    readout.rank(t, None)
    times = []
    for _ in range(20):
        start = time.process_time()
        readout.rank(t, None)
        times.append(time.process_time() - start)
    assert min(times) < 0.005  # seconds of one processor; about .001 when it is quiet
