"""The retriever from documents to hits: three lines, exclusions, ids, views, readouts, files."""

import math

import numpy as np
import pytest
from recursive_fakes import HashEncoder

from retrail.data_prep.corpus import Corpus, Node
from retrail.models.protocols import Retriever, State
from retrail.models.recursive.index import IndexMismatchError
from retrail.models.recursive.readouts.registry import READOUTS, make_readout
from retrail.models.recursive.retriever import RecursiveRetriever
from retrail.models.recursive.search import JointFeedback, TreeSearch
from retrail.models.recursive.traversal_store import read_traversals, save_traversals

DOCUMENTS = {f"d{n}": f"document {n}" for n in range(40)}


def built(**options):
    retriever = RecursiveRetriever(HashEncoder(), strategy=TreeSearch(3, 2), **options)
    retriever.build_index(DOCUMENTS)
    return retriever


def test_three_lines():
    retriever = RecursiveRetriever(HashEncoder())
    index = retriever.build_index(DOCUMENTS)
    hits = retriever.semantic_search("who wrote it?", index, top_k=3)
    assert isinstance(retriever, Retriever)
    [same] = retriever.search(["who wrote it?"], k=3)
    assert [hit["corpus_id"] for hit in hits] == list(same.ids) and [hit["score"] for hit in hits] == list(same.scores)
    assert [index.vectors.ids[hit["index"]] for hit in hits] == list(same.ids)
    several = retriever.semantic_search(["who wrote it?", "b"], index, top_k=3)
    assert several[0] == hits and len(several) == 2


def test_ids_keep_their_type():
    retriever = RecursiveRetriever(HashEncoder(), strategy="dense", readout="root")
    index = retriever.build_index(list(DOCUMENTS.values()))
    assert index.vectors.ids == tuple(range(40))
    hits = retriever.semantic_search("q", index, top_k=2)
    assert all(type(hit["corpus_id"]) is int for hit in hits)
    [found] = retriever.search(["q"], k=2, excluded=[[hits[0]["corpus_id"]]])
    assert found.ids[0] == str(hits[1]["corpus_id"])
    with pytest.raises(KeyError, match="its ids are int"):
        retriever.search(["q"], excluded=[["7"]])


def test_a_corpus_is_its_leaves():
    nodes = [Node("p", None, "page", "all"), Node("a", "p", "Title", "text"), Node("b", "p", "", "bare")]
    retriever = RecursiveRetriever(HashEncoder(), strategy="chain")
    index = retriever.build_index(Corpus.from_nodes(nodes))
    assert index.vectors.ids == ("a", "b") and [index.text(n) for n in (0, 1)] == ["Title\ntext", "bare"]
    [hits] = retriever.search(["q"])
    assert set(hits.ids) == {"a", "b"}


@pytest.mark.parametrize("name", sorted(READOUTS))
@pytest.mark.parametrize("strategy", [TreeSearch(3, 2), JointFeedback(2)])
def test_excluded_documents_are_never_seen(name, strategy):
    retriever = built()
    retriever.strategy = strategy
    out = [f"d{n}" for n in range(5, 40)]
    readout = make_readout(name, {"parts": ["global", "rrf"]} if name == "z_agreement" else None)
    if isinstance(strategy, JointFeedback) and (readout.realised or readout.views):
        readout = make_readout("global")
    some, none = retriever.search(["q", "q"], k=40, readout=readout, excluded=[out, list(DOCUMENTS)])
    assert set(some.ids) <= set(DOCUMENTS) - set(out) and some.ids and none.ids == ()
    shown = {node for step in some.trace for node in (*step.ids, *step.kept)}
    assert not shown & set(out) and not any(
        f"has read {node}" in " ".join(step.notes) for step in some.trace for node in out
    )


def test_one_search_serves_a_table(tmp_path):
    retriever = built()
    traversals = retriever.traverse(["a", "b"], ranges=True)
    encoder = retriever.encoder
    encoder.calls.clear()
    names = ["global", "root", "rrf", "path_product", "probability_chain", "selected_set", "terminal", "combmnz"]
    table = {name: retriever.read(traversals, name, k=5) for name in names}
    assert encoder.calls == []
    for name, hits in table.items():
        fresh = retriever.search(["a", "b"], k=5, readout=name)
        assert [(h.ids, h.scores) for h in hits] == [(h.ids, h.scores) for h in fresh]
    assert table["probability_chain"][0].scores == (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5)
    # Written down, and read by another process with the same index.
    save_traversals(tmp_path / "t", dict(zip("ab", traversals, strict=True)), index=retriever.index.identity)
    again = read_traversals(tmp_path / "t", index=built().index.identity)
    for name in names:
        assert [h.ids for h in built().read(list(again.values()), name, k=5)] == [h.ids for h in table[name]]


def test_views_are_formed_where_a_readout_needs_them():
    retriever = built()
    traversals = retriever.traverse(["a", "b"])
    [hits, _] = retriever.read(traversals, "recovery_fusion", k=5)
    with_view = retriever.with_views(traversals, ["recovery"])
    assert [len(t.views["recovery"]) for t in with_view] == [len(t.proposals) for t in traversals]
    assert retriever.read(with_view, "recovery_fusion", k=5)[0].ids == hits.ids
    states = sum(s.cost.prompt_tokens for s in (*with_view[0].states, *with_view[0].views["recovery"]))
    assert hits.cost.prompt_tokens == states
    with pytest.raises(ValueError, match="there is no view 'other'; use one of: recovery"):
        retriever.with_views(traversals, ["other"])


def test_assembly_by_its_rule():
    retriever = built()
    encoder, index = retriever.encoder, retriever.index
    readout = make_readout("assembly", {"pool": 6, "n": 4})
    [hits] = retriever.search(["q"], k=40, readout=readout, instruction="find")
    [base] = retriever.search(["q"], k=40, readout="global", instruction="find")
    pool, chosen = list(base.ids[:6]), []
    for _ in range(4):
        z = encoder.vector(State("q", tuple(DOCUMENTS[d] for d in chosen), "assembly", "find"))
        rest = [d for d in pool if d not in chosen]
        chosen.append(max(rest, key=lambda d: float(index.vectors.vectors([index.vectors.row(d)])[0] @ z)))
    assert list(hits.ids) == chosen + [d for d in base.ids if d not in chosen]
    # 10 tokens a state and 10 a document: what the search took, then four encodings.
    assert hits.cost.prompt_tokens == base.cost.prompt_tokens + 10 + 20 + 30 + 40
    tiny = make_readout("assembly", {"pool": 2, "n": 10})
    assert len(retriever.search(["q"], k=40, readout=tiny)[0]) == len(base.ids)


def test_no_session_of_a_readout_remembers_more_than_a_batch():
    retriever = built(batch_size=2)
    queries = list("abcde")
    traversals = retriever.traverse(queries)
    whole = built(batch_size=5).search(queries, readout="assembly")
    sessions = []

    def session():
        sessions.append(seen := set())
        made = HashEncoder().session()
        plain = made.encode

        def encode(states, owners):
            seen.update(state.query for state in states)
            return plain(states, owners)

        made.encode = encode
        return made

    retriever.encoder.session = session
    hits = retriever.read(traversals, "assembly")
    assert [h.ids for h in hits] == [h.ids for h in whole]
    assert [h.cost.prompt_tokens for h in hits] == [h.cost.prompt_tokens for h in whole]
    assert [sorted(seen) for seen in sessions] == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize("lam", [0.8, 1.0, 0.0])
def test_root_interpolation_by_its_rule(lam):
    retriever = built()
    out = [f"d{n}" for n in range(3)]
    [traversal] = retriever.traverse(["q"], excluded=[out])
    last = sorted(traversal.states, key=lambda s: (s.level, s.path_score))[-1]
    z = lam * traversal.states[0].vector_D + (1 - lam) * last.vector_D
    z = z / math.sqrt(float(z @ z))
    scores = {d: float(retriever.index.vectors.vectors([n])[0] @ z) for n, d in enumerate(DOCUMENTS) if d not in out}
    [hits] = retriever.read([traversal], make_readout("root_interpolation", {"lam": lam}), k=10)
    assert list(hits.ids) == sorted(scores, key=lambda d: -scores[d])[:10]
    assert hits.scores == pytest.approx(sorted(scores.values())[::-1][:10], abs=1e-6)


def test_the_trace_is_the_tree():
    [hits] = built().search(["q"], k=3, excluded=[["d0"]])
    root, first = hits.trace[0], hits.trace[1]
    assert root.name == "level 1" and root.notes == ("state 0",) and len(root.kept) == 2
    assert first.name == "level 2" and first.notes == (f"state 1, from state 0, has read {root.kept[0]}",)
    assert len(root.ids) == 10 and root.scores[0] >= root.scores[-1]
    assert hits.cost.prompt_tokens == sum(step.cost.prompt_tokens for step in hits.trace)


def test_a_folder_is_opened_again_and_refused_for_others(tmp_path):
    first = RecursiveRetriever(HashEncoder(), strategy="chain")
    first.build_index(DOCUMENTS, folder=tmp_path / "index", dtype="float16")
    again = RecursiveRetriever(HashEncoder(), strategy="chain")
    calls = []
    again.encoder.encode_documents = lambda *args, **kwargs: calls.append(args)
    index = again.build_index(DOCUMENTS, folder=tmp_path / "index", dtype="float16")
    assert calls == [] and index.vectors.dtype == "float16"
    assert again.search(["q"])[0].ids == first.search(["q"])[0].ids
    changed = dict(DOCUMENTS) | {"d3": "changed"}
    with pytest.raises(IndexMismatchError, match="corpus was"):
        again.build_index(changed, folder=tmp_path / "index", dtype="float16")
    with pytest.raises(IndexMismatchError, match="contract.dim was 16 .* is 8 here"):
        RecursiveRetriever(HashEncoder(8)).build_index(DOCUMENTS, folder=tmp_path / "index", dtype="float16")


def test_an_index_serves_other_prompts_and_folders_but_no_other_encoder(tmp_path):
    first, again = RecursiveRetriever(HashEncoder()), RecursiveRetriever(HashEncoder())
    first.encoder.contract |= {"source": "runs/a", "prompts": {"wrap": "keep"}, "max_state_tokens": 99}
    again.encoder.contract |= {"source": "/data/runs/a", "prompts": {"wrap": "lines"}, "max_state_tokens": 9}
    index = first.build_index(DOCUMENTS)
    first.build_index(DOCUMENTS, folder=tmp_path / "index")
    again.build_index(DOCUMENTS, folder=tmp_path / "index")
    assert again.search(["q"], index)[0].ids == again.search(["q"])[0].ids
    assert first.description != again.description
    again.encoder.contract |= {"weights": "others"}
    with pytest.raises(IndexMismatchError, match="contract.weights was None .* is 'others' here"):
        again.build_index(DOCUMENTS, folder=tmp_path / "index")
    with pytest.raises(IndexMismatchError, match="the index that is searched: contract.weights was None"):
        again.search(["q"], index)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: RecursiveRetriever(HashEncoder()).search(["q"]), ValueError, r"call build_index\(documents\) first"),
        (lambda r: r.search(["q"], k=0), ValueError, "k=0 must be above 0"),
        (lambda r: r.search("q"), TypeError, "put a single query in a list"),
        (lambda r: r.search(["q"], excluded=[]), ValueError, "excluded is given for 0 queries, but there are 1"),
        (lambda r: r.search(["q"], instruction=["a", "b"]), ValueError, "instruction is given for 2 queries"),
        (lambda r: r.search(["q"], excluded=[["zz"]]), KeyError, "no document 'zz' in this index of 40"),
        (lambda r: r.search(["q"], strategy="joint_feedback", readout="path_product"), ValueError, "makes none"),
        (lambda r: r.build_index("text"), TypeError, "documents must be a mapping"),
    ],
)
def test_what_cannot_be(call, error, message):
    with pytest.raises(error, match=message):
        call(built())


def test_small_corpora():
    for count in (0, 1, 2):
        retriever = RecursiveRetriever(HashEncoder(), strategy=TreeSearch(4, 3))
        retriever.build_index({f"d{n}": f"t{n}" for n in range(count)})
        [hits] = retriever.search(["q"], k=10)
        assert len(hits) == count
    assert retriever.search([]) == []


def test_an_empty_index_is_searched_where_it_is_asked_for():
    retriever = built()
    last = retriever.index
    empty = retriever.build_index({})
    retriever.index = last
    assert len(retriever.search(["q"], empty)[0]) == 0 and len(retriever.search(["q"])[0]) > 0


def test_instructions_are_those_of_each_query():
    retriever = built()
    both = retriever.search(["q", "q"], k=5, instruction=["one", None])
    assert both[0].scores == retriever.search(["q"], k=5, instruction="one")[0].scores
    assert both[1].scores == retriever.search(["q"], k=5)[0].scores
    assert not np.array_equal(both[0].scores, both[1].scores)
