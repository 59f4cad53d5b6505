import hashlib
from collections import Counter

import numpy as np
import pytest

from retrail.data_prep.chains import Chain
from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.formats.multidoc2dial import prep_multidoc2dial
from retrail.data_prep.formats.multihop import prep_multihop
from retrail.data_prep.hits import Hits
from retrail.data_prep.negatives import TextKeys
from retrail.data_prep.state_rows import (
    DrawConfig,
    Target,
    WrongDocuments,
    chain_rows,
    dialogue_rows,
    ids_of,
    pair_rows,
    state_id,
)
from retrail.data_prep.task import Query

# Rows 0-2 are gold, 4-6 distractors, 8 a copy of row 1; the rest is others.
IDS = ["g0", "g1", "g2", "g3", "x4", "x5", "x6", "x7", "copy", *(f"o{i}" for i in range(9, 30))]
CORPUS = Corpus.from_nodes(
    Node(doc, None, f"title {doc}", "text  of G1\n" if doc == "copy" else f"text of {doc}") for doc in IDS
)
Q = Query("q", "who?")
CHAIN = Chain(("g0", "g1", "g2"), True, ("x4", "x5", "x6"), "3hop")
ALWAYS = DrawConfig(recovery_share=1.0, random_share=0.0)


def one(chain=CHAIN, **wrong):
    return chain_rows(CORPUS, [Q], {"q": chain}, source="toy", wrong=WrongDocuments(**wrong))


def draws(rows, config, number=300, row=0):
    return [rows.draw(row, epoch, config) for epoch in range(number)]


def test_one_row_holds_all_hops_of_a_chain():
    row = one().draw(0, 0, DrawConfig(recovery_share=0.0))
    assert (row.query_id, row.query, row.hops, row.chain, row.gold) == ("q", "who?", 3, (0, 1, 2), (0, 1, 2))
    assert (row.group, row.source, row.name, row.instruction_key) == ("q", "toy", "toy:q", "multi-hop")
    assert row.wrong == (None, None, None)
    assert list(row.targets()) == [
        Target(0, "root", (), 0, (4, 5, 6)),
        Target(1, "continuation", (0,), 1, (4, 5, 6)),
        Target(2, "continuation", (0, 1), 2, (4, 5, 6)),
    ]


def test_a_recovery_state_observes_the_wrong_document_last():
    for row in draws(one(), ALWAYS, 50):
        states = list(row.targets())
        assert [(s.hop, s.role) for s in states] == [
            (0, "root"), (0, "recovery"), (1, "continuation"), (1, "recovery"), (2, "continuation"), (2, "recovery"),
        ]  # fmt: skip
        for hop, wrong in enumerate(row.wrong):
            assert states[2 * hop + 1].observed == (*row.chain[:hop], wrong)
            assert states[2 * hop + 1].positive == row.chain[hop]
            assert wrong in (4, 5, 6)


def test_the_contrastive_negative_is_not_the_one_in_context_where_there_are_two():
    for row in draws(one(), ALWAYS):
        for wrong, negatives in zip(row.wrong, row.negatives, strict=True):
            assert len(negatives) == 2 and wrong not in negatives
    for row in draws(one(Chain(("g0",), False, ("x4",))), ALWAYS, 20):
        assert (row.wrong, row.negatives) == ((4,), ((4,),))  # there is no other


def test_own_wrong_picks_come_before_distractors_and_are_never_right():
    rows = one(picks={"q": ("g1", "x7", "copy", "g0", "o9", "o10", "o11", "o12", "o13")}, pick_depth=3)
    seen = Counter(doc for row in draws(rows, ALWAYS) for doc in row.wrong)
    assert set(seen) == {IDS.index("x7"), IDS.index("o9"), IDS.index("o10")}
    assert min(seen.values()) > 200  # of 900
    # Those of one state go before those of the query; they may come from a run.
    run = {"q": Hits(("x7",), (1.0,)), state_id("q", 1): Hits(("g0", "o20"), (1.0, 0.5))}
    rows = one(picks=ids_of(run))
    assert {row.wrong for row in draws(rows, ALWAYS, 30)} == {(7, 20, 7)}


def test_shares_are_kept():
    rows = one(picks={"q": ("x7",)})
    config = DrawConfig(recovery_share=0.3, random_share=0.15, seed=5)
    wrong = [doc for row in draws(rows, config, 2000) for doc in row.wrong]
    recovered = [doc for doc in wrong if doc is not None]
    assert len(recovered) / len(wrong) == pytest.approx(0.3, abs=0.02)
    by_chance = [doc for doc in recovered if doc != 7]
    assert len(by_chance) / len(recovered) == pytest.approx(0.15, abs=0.03)
    # By chance: neither right, nor a copy of what is right, nor a distractor; all others come up.
    assert set(by_chance) == {3, *range(9, 30)}
    assert not any(doc is not None for row in draws(rows, DrawConfig(recovery_share=0.0), 50) for doc in row.wrong)


def test_a_draw_follows_from_seed_epoch_and_row_alone():
    queries = [Query(f"q{i}", f"who {i}?") for i in range(5)]
    chains = {q.id: CHAIN for q in queries}
    config = DrawConfig(negatives=2, recovery_share=0.5, paraphrases=4, seed=3)
    make = lambda: chain_rows(CORPUS, queries, chains, source="toy")  # noqa: E731
    first, second = make(), make()
    forward = {(row, epoch): first.draw(row, epoch, config) for row in range(5) for epoch in range(6)}
    for (row, epoch), drawn in reversed(forward.items()):
        assert second.draw(row, epoch, config) == drawn
    assert first.digest == second.digest
    # Other epochs, rows and seeds are other draws.
    assert len({(d.paraphrase, d.negatives, d.wrong) for d in forward.values()}) > 20
    again = [
        first.draw(row, epoch, DrawConfig(negatives=2, recovery_share=0.5, paraphrases=4, seed=4))
        for row, epoch in forward
    ]
    assert sum(a != b for a, b in zip(again, forward.values(), strict=True)) > 20
    assert {d.paraphrase for d in forward.values()} == {0, 1, 2, 3}


def test_the_digest_notices_every_part():
    seen = {
        one().digest,
        one(Chain(CHAIN.gold, False, CHAIN.distractors)).digest,
        one(Chain(CHAIN.gold, True, ("x4",))).digest,
        one(Chain(("g1", "g0", "g2"), True, CHAIN.distractors)).digest,
        one(rankings=[{"q": ("o9",)}]).digest,
        one(rankings=[{"q@1": ("o9",)}]).digest,
        one(rankings=[{"q@2": ("o9",)}]).digest,
        one(picks={"q": ("o9",)}).digest,
        one(picks={"q@2": ("o9",)}).digest,
        chain_rows(CORPUS, [Query("q", "what?")], {"q": CHAIN}, source="toy").digest,
    }
    assert len(seen) == 10


def test_a_chain_without_order_has_another_one_each_time():
    rows = one(
        Chain(("g0", "g1"), False, ("x4",)), rankings=[{"q@1": ("o9",), "q@2": ("o10",)}], picks={"q@2": ("o11",)}
    )
    drawn = draws(rows, ALWAYS, 200)
    assert Counter(row.chain for row in drawn)[0, 1] == pytest.approx(100, abs=30)
    assert {row.chain for row in drawn} == {(0, 1), (1, 0)}
    # What was mined for its second state held one order only; the first state is the same in both.
    assert {doc for row in drawn for doc in (*row.negatives[1], row.wrong[1])} == {4}
    assert {(row.negatives[0], row.wrong[0]) for row in drawn} == {((9,), 4)}


@pytest.mark.parametrize("count", range(8))
def test_from_no_negatives_to_seven(count):
    pool = [f"o{i}" for i in range(9, 9 + count)]
    rows = pair_rows(
        CORPUS, [Q], {"q": {"g0": 1}}, instruction_key="beir", source="t", wrong=WrongDocuments(rankings=[{"q": pool}])
    )
    for config in (DrawConfig(recovery_share=0.0), DrawConfig(negatives=3, recovery_share=0.0)):
        for row in draws(rows, config, 20):
            [negatives] = row.negatives
            assert len(negatives) == min(count, config.negatives)
            assert set(negatives) <= {IDS.index(doc) for doc in pool}
            assert list(negatives) == sorted(set(negatives))  # in the order of the ranking, none twice


def test_rankings_take_turns_inside_their_window():
    first, second = {"q": ("o9", "o10", "g1", "o11", "o12")}, {"q": ("o20", "o21", "copy", "o10")}
    rows = one(rankings=[first, second, {"other": ("o29",)}], ranks=(2, 4), depth=3)
    [hop, *_] = rows.draw(0, 0, DrawConfig(recovery_share=0.0)).negatives
    # In turn: distractors 4 5 6, and of ranks 2 to 4: o10 o21 | (gold, copy) | o11 (o10): three of them.
    assert hop == (4, 10, 5, 21, 6, 11)


def test_a_right_document_is_never_a_negative_of_any_hop():
    everything = {"q": IDS, "q@1": IDS, "q@2": IDS, "q@3": IDS}
    rows = one(rankings=[everything], picks=everything, depth=100, pick_depth=100)
    for row in draws(rows, DrawConfig(recovery_share=1.0, random_share=0.5), 200):
        shown = {doc for docs in row.negatives for doc in docs} | set(row.wrong)
        assert shown.isdisjoint({0, 1, 2, 8}) and 3 not in row.chain


def test_pairs_share_the_gold_of_their_query_and_count_what_is_left_out():
    qrels = {"q": {"g0": 2, "g1": 1, "x4": 0, "lost": 1}, "r": {}, "s": {"lost": 1}}
    queries = [Q, Query("r", "none?"), Query("s", "lost?")]
    rows = pair_rows(CORPUS, queries, qrels, instruction_key="beir/toy", source="toy")
    assert [rows.draw(i, 0, DrawConfig()).chain for i in range(len(rows))] == [(0,), (1,)]
    assert {rows.draw(i, 0, DrawConfig()).gold for i in range(2)} == {(0, 1)}
    assert rows.skipped == {"missing_gold": 2, "without_gold": 1}
    assert rows.draw(0, 0, DrawConfig(negatives=7)).negatives == ((),)
    assert next(rows.draw(0, 0, DrawConfig(recovery_share=0.0)).targets()).role == "root"


def test_a_chain_ends_before_a_document_that_the_corpus_lacks():
    chains = {
        "a": Chain(("g0", "lost", "g2"), True),
        "b": Chain(("lost", "g1"), True),
        "c": Chain(("lost", "g1"), False),
    }
    queries = [Query(q, "?") for q in "abcd"]
    rows = chain_rows(CORPUS, queries, chains, source="toy")
    drawn = [rows.draw(i, 0, DrawConfig()) for i in range(len(rows))]
    assert [(r.query_id, r.chain, r.gold) for r in drawn] == [("a", (0,), (0, 2)), ("c", (1,), (1,))]
    assert rows.skipped == {"missing_gold": 3, "cut_chains": 2, "no_gold": 1, "without_chain": 1}
    assert [rows.hops(0), rows.hops(1)] == [1, 1]


def test_turns_of_one_dialogue_are_one_group():
    queries = [Query("d1_2", "a"), Query("d1_4", "b"), Query("d2_2", "c"), Query("x", "d")]
    rows = dialogue_rows(CORPUS, queries, {q.id: {"g0": 1} for q in queries}, source="mdd")
    assert [rows.draw(i, 0, DrawConfig()).group for i in range(4)] == ["d1", "d1", "d2", "x"]


def test_in_a_tree_nothing_above_or_below_a_right_node_is_wrong():
    parents = {"page": None, "other": None, "gold": "page", "sister": "page", "child": "gold", "leaf": "other"}
    corpus = Corpus.from_nodes(Node(name, parent, "", f"text of {name}") for name, parent in parents.items())
    ranked = {"q": ("page", "child", "sister", "other", "gold")}
    rows = pair_rows(
        corpus, [Q], {"q": {"gold": 1}}, instruction_key="t", source="t",
        wrong=WrongDocuments(rankings=[ranked], picks=ranked),
    )  # fmt: skip
    allowed = {corpus.row("sister"), corpus.row("other")}
    for row in draws(rows, DrawConfig(recovery_share=1.0, random_share=0.0), 50):
        assert {*row.negatives[0], row.wrong[0]} == allowed
    by_chance = {row.wrong[0] for row in draws(rows, DrawConfig(recovery_share=1.0, random_share=1.0), 50)}
    assert by_chance == {corpus.row(name) for name in ("sister", "leaf")}


def test_a_corpus_of_right_documents_has_no_wrong_one():
    corpus = Corpus.from_nodes([Node("a", None, "", "A"), Node("b", None, "", "a ")])
    rows = pair_rows(corpus, [Q], {"q": {"a": 1}}, instruction_key="t", source="t")
    assert rows.draw(0, 0, DrawConfig(recovery_share=1.0)).wrong == (None,)


def test_unknown_documents_and_bad_settings():
    with pytest.raises(KeyError, match="no node 'gone'"):
        one(Chain(("g0",), False, ("gone",)))
    with pytest.raises(KeyError, match="no node 'gone'"):
        one(rankings=[{"q": ("gone",)}])
    for settings, message in [
        ({"negatives": 8}, "negatives=8 must be between 0 and 7"),
        ({"recovery_share": 1.5}, "recovery_share=1.5"),
        ({"random_share": float("nan")}, "random_share=nan"),
        ({"paraphrases": 0}, "paraphrases=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            DrawConfig(**settings)
    with pytest.raises(ValueError, match="ranks 0 to 3"):
        WrongDocuments(ranks=(0, 3))
    with pytest.raises(ValueError, match="pick_depth=-1"):
        WrongDocuments(pick_depth=-1)


def test_text_keys():
    keys = TextKeys(CORPUS)
    assert keys.of(1) == keys.of(8) != keys.of(0)
    assert len(set(keys.all().tolist())) == len(CORPUS) - 1
    raw = hashlib.blake2b(b"text of g1", digest_size=8).digest()
    assert keys.all()[1] == np.uint64(int.from_bytes(raw, "little"))


def test_rows_of_the_real_chains(data_dir, tmp_path):
    folder = data_dir / "musique"
    task = prep_multihop("musique", {"train": folder / "musique_ans_v1.0_train_sample100.jsonl.gz"}, tmp_path / "t")
    rows = chain_rows(task.corpus, task.queries("train"), task.chains("train"), source="musique")
    assert len(rows) == 100 and rows.skipped == {}
    drawn = [rows.draw(i, 0, DrawConfig()) for i in range(100)]
    assert Counter(row.hops for row in drawn) == {2: 68, 3: 27, 4: 5}
    assert all(len(negatives) == 7 for row in drawn for negatives in row.negatives)
    chains = task.chains("train")
    for row in drawn:
        given = {task.corpus.row(doc) for doc in chains[row.query_id].distractors}
        assert tuple(task.corpus.id(r) for r in row.chain) == chains[row.query_id].gold
        assert {doc for docs in row.negatives for doc in docs} <= given
    states = [state for row in drawn for state in row.targets()]
    recovery = sum(state.role == "recovery" for state in states)
    assert 0.2 < recovery / (len(states) - recovery) < 0.4


def test_rows_of_the_real_dialogues(data_dir, tmp_path):
    folder = data_dir / "doc2dial_multidoc2dial"
    task = prep_multidoc2dial(
        folder / "doc2dial_doc.val273.rebuilt.json.gz",
        [folder / "doc2dial_dial_validation.rebuilt.json.gz"],
        tmp_path / "task",
    )
    rows = dialogue_rows(task.corpus, task.queries("train"), task.qrels("train"), source="mdd")
    drawn = [rows.draw(i, 0, DrawConfig()) for i in range(200)]
    assert len(rows) > 2000 and all(task.corpus.is_leaf(row.chain[0]) for row in drawn)
    assert 10 < len({row.group for row in drawn}) < 100
