"""The readers of multi-hop data sets on tiny official files, and beside a slow twin on the real ones."""

import gzip
import json
import re
from collections import Counter

import pytest

from retrail.data_prep.formats.multihop import document_id, prep_multihop, read_pool, report
from retrail.data_prep.formats.multihop_questions import (
    Paragraph,
    bridge_order,
    evidence_order,
    join_sentences,
    read_2wiki,
    read_hotpotqa,
    read_musique,
)
from retrail.eval.suites import evaluate_suite, get_suite
from retrail.models.bm25 import BM25


def write(file, value):
    """One JSON value, or a line each for `.jsonl`; gzipped for `.gz`."""
    text = "".join(json.dumps(row) + "\n" for row in value) if ".jsonl" in file.name else json.dumps(value)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def musique(qid="2hop__1_2", steps=(1, 0), number=3, **changes):
    """Paragraphs A, B, C ...; the steps of the decomposition use those of these numbers."""
    paragraphs = [
        {"idx": i, "title": "ABCDEF"[i], "paragraph_text": f" text {'ABCDEF'[i]} ", "is_supporting": i in steps}
        for i in range(number)
    ]
    decomposition = [{"id": i, "question": "?", "answer": "!", "paragraph_support_idx": s} for i, s in enumerate(steps)]
    row = {"id": qid, "paragraphs": paragraphs, "question": f"what {qid}?", "question_decomposition": decomposition}
    return row | {"answer": "!", "answer_aliases": [], "answerable": True} | changes


def titled(qid, kind, facts, context, **more):
    facts = [[title, 0] for title in facts]
    context = [[title, [text] if isinstance(text, str) else text] for title, text in context.items()]
    row = {"_id": qid, "question": f"what {qid}?", "answer": "yes", "type": kind, "level": "hard"}
    return row | {"supporting_facts": facts, "context": context} | more


def test_musique_order_is_that_of_the_decomposition(tmp_path):
    rows = [musique(), musique("3hop1__4_5_6", (2, 0, 2))]  # two steps may use one paragraph
    for name in ("m_dev.jsonl", "m_dev.jsonl.gz"):
        first, second = read_musique(write(tmp_path / name, rows))
        assert (first.id, first.text, first.answer, first.kind) == ("2hop__1_2", "what 2hop__1_2?", "!", "2hop")
        assert [p.title for p in first.gold] == ["B", "A"] and first.ordered
        assert first.others == (Paragraph("C", "text C"),)
        assert [p.title for p in first.paragraphs] == ["A", "B", "C"]
        assert [p.title for p in second.gold] == ["C", "A"] and second.kind == "3hop1"


def test_missing_musique_gold_is_named_and_not_dropped(tmp_path):
    rows = [musique(steps=(1, None)), musique("2hop__3_4", (0, 9)), musique("2hop__5_6")]
    rows[2]["paragraphs"][0] |= {"title": " ", "paragraph_text": ""}
    first, second, third = read_musique(write(tmp_path / "m.jsonl", rows))
    assert (first.gold[1], second.gold[1], third.gold[1]) == (
        "paragraph of step 2",
        "paragraph 9",
        "number 2 without text",
    )
    assert third.empty == 1 and len(third.paragraphs) == 2
    task = prep_multihop("musique", {"dev": tmp_path / "m.jsonl"}, tmp_path / "out")
    assert task.manifest["splits"]["dev"]["dangling_judgements"] == 3
    assert [len(docs) for docs in task.qrels("dev").values()] == [2, 2, 2]
    assert "dev: 3 of 6 gold documents are not in the corpus (3 questions); they count as not found" in report(task)
    assert "dev: 1 empty paragraphs left out" in report(task)
    # Recall does not go up because something was not there.
    every = evaluate_suite(Everything(task.corpus), task, get_suite("musique"))
    assert every.values["Recall@5"] == 0.5 and every.values["All@5"] == 0.0
    assert every.evaluation.counts.dangling == 3


class Everything:
    """Ranks the whole corpus."""

    def __init__(self, corpus):
        self.ids = [corpus.id(row) for row in range(len(corpus))]

    def search(self, queries, *, k):
        from retrail.data_prep.hits import Hits

        return [Hits.from_scores(self.ids, [0.0] * len(self.ids), k) for _ in queries]


def test_the_unanswerable_half_of_musique_full_gives_paragraphs_only(tmp_path):
    other = musique("2hop__1_2", (None, None), 5, answerable=False)
    file = write(tmp_path / "m_train.jsonl", [musique(), other])
    task = prep_multihop("musique", {"train": file}, tmp_path / "out")
    assert [q.id for q in task.queries("train")] == ["2hop__1_2"] and len(task.corpus) == 5
    assert "train: 1 unanswerable left out" in report(task)


def test_a_test_file_needs_no_gold(tmp_path):
    bare = {key: value for key, value in musique().items() if key not in ("question_decomposition", "answer")}
    for paragraph in bare["paragraphs"]:
        del paragraph["is_supporting"]
    file = write(tmp_path / "m_test.jsonl", [bare])
    task = prep_multihop("musique", {"test": file}, tmp_path / "out")
    assert task.chains("test") == {} and task.qrels("test") == {"2hop__1_2": {}}
    with pytest.raises(ValueError, match=r"m_test\.jsonl:1 has no key 'question_decomposition'"):
        prep_multihop("musique", {"dev": file}, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": " "}, r"m\.jsonl:2\['question'\] is empty"),
        ({"id": "2hop__1_2"}, r"m\.jsonl:2: id '2hop__1_2' appears twice"),
        ({"paragraphs": {}}, r"m\.jsonl:2\['paragraphs'\] must be an array"),
        ({"question_decomposition": [{}]}, r"\['question_decomposition'\]\[0\] has no key 'paragraph_support_idx'"),
        ({"question_decomposition": []}, r"m\.jsonl:2: paragraphs \[0, 1\] are marked is_supporting, but the decomp"),
    ],
)
def test_bad_musique(tmp_path, change, message):
    file = write(tmp_path / "m.jsonl", [musique(), musique("2hop__7_8") | change])
    with pytest.raises(ValueError, match=message):
        list(read_musique(file))


def test_a_paragraph_number_twice(tmp_path):
    row = musique()
    row["paragraphs"][2]["idx"] = 0
    with pytest.raises(ValueError, match=r"\['paragraphs'\]\[2\]: idx 0 appears twice"):
        list(read_musique(write(tmp_path / "m.jsonl", [row])))


@pytest.mark.parametrize(
    ("titles", "texts", "order"),
    [
        (("Film", "Jane Doe"), ("by Jane Doe.", "a writer"), [0, 1]),
        (("Jane Doe", "Film"), ("a writer", "by Jane Doe."), [1, 0]),
        (("A", "B"), ("nothing", "nothing"), None),
        (("Aa", "Bb"), ("see Bb", "see Aa"), None),
        (("Her", "Spike"), ("a film by Spike", "called her friend"), [0, 1]),  # case first
        (("Film", "Jane Doe"), ("by JANE DOE.", "a writer"), [0, 1]),
        (("Film", "Mercury (planet)"), ("about Mercury", "a planet"), [0, 1]),
        (("Film", "Ann"), ("about Anna", "a name"), None),  # whole words only
        (("Film", "C++ (x)"), ("about C++, a language", "..."), [0, 1]),
        (("Film", "(x)"), ("about", "..."), None),
        (("A", "B", "C"), ("B", "C", ""), None),
    ],
)
def test_bridge_order(titles, texts, order):
    assert bridge_order(titles, texts) == order


@pytest.mark.parametrize(
    ("titles", "subjects", "order"),
    [
        (("A", "B"), ("A", "B"), [0, 1]),
        (("A", "B"), ("B", "A"), [1, 0]),
        (("A (film)", "B"), ("b", "a"), [1, 0]),
        (("A (film)", "A"), ("A", "A (film)"), [1, 0]),
        (("A (film)", "A (song)"), ("a", "x"), None),
        (("A", "B"), ("A",), None),
        (("A", "B"), ("A", "B", "C"), None),
    ],
)
def test_evidence_order(titles, subjects, order):
    assert evidence_order(titles, subjects) == order


def test_hotpotqa(tmp_path):
    context = {"Jane": "A writer.", "Film": ["A film.", " Written by Jane."], "Other": "x", "Empty": []}
    rows = [
        titled("a", "bridge", ["Jane", "Film", "Jane"], context),
        titled("b", "comparison", ["Jane", "Film"], context),
        titled("c", "bridge", ["Film", "Absent"], context),
    ]
    a, b, c = read_hotpotqa(write(tmp_path / "hotpot_dev.json.gz", rows))
    assert [p.title for p in a.gold] == ["Film", "Jane"] and a.ordered and a.kind == "bridge"
    assert a.gold[0].text == "A film. Written by Jane."
    assert a.others == (Paragraph("Other", "x"), Paragraph("Empty", "Empty"))
    assert [p.title for p in b.gold] == ["Jane", "Film"] and not b.ordered
    assert c.gold[1] == "Absent" and not c.ordered


def test_2wiki(tmp_path):
    context = {name: f"text {name}" for name in ("F", "G", "D", "E (x)", "Z")}
    triples = [["G", "director", "E"], ["F", "director", "D"], ["D", "born", "1"], ["e", "born", "2"]]
    rows = [
        titled("a", "bridge_comparison", ["F", "G", "D", "E (x)"], context, evidences=triples),
        titled("b", "comparison", ["G", "F"], context, evidences=triples[:2]),
        titled(
            "c", "compositional", ["F", "G"], context, entity_ids="Q1_Q2",
            evidences=[["alias of G", "by", "F"], ["F", "born", "1"]],
            evidences_id=[["Q2", "by", "Q1"], ["Q1", "born", "date"]],
        ),
        titled("d", "inference", ["F", "G"], context, evidences=[["alias", "by", "F"], ["F", "born", "1"]]),
        titled("e", "inference", ["F"], context, evidences=[["F", "by", "1"]]),
    ]  # fmt: skip
    questions = list(read_2wiki(write(tmp_path / "dev.json", rows)))
    assert [([p.title for p in q.gold], q.ordered) for q in questions] == [
        (["G", "F", "D", "E (x)"], True),
        (["G", "F"], False),
        (["G", "F"], True),  # by the ids
        (["F", "G"], False),  # nothing says which is which
        (["F"], False),
    ]
    rows[0]["evidences"][1] = ["F", "director"]
    with pytest.raises(ValueError, match=r"dev\.json\[0\]\['evidences'\]\[1\] has 2 parts"):
        list(read_2wiki(write(tmp_path / "dev.json", rows)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, r"\[1\]\['context'\] must be an array, not null"),
        ({"context": [["T"]]}, r"\['context'\]\[0\] has 1 parts, not 2"),
        ({"context": [["T", [1]]]}, r"\['context'\]\[0\]\[1\] must be a string"),
        ({"supporting_facts": [["T", "0"]]}, r"\['supporting_facts'\]\[0\]\[1\] must be an integer"),
        ({"_id": "a"}, r"h\.json\[1\]: _id 'a' appears twice"),
    ],
)
def test_bad_hotpotqa(tmp_path, change, message):
    good = titled("a", "bridge", ["A"], {"A": "x"})
    with pytest.raises(ValueError, match=message):
        list(read_hotpotqa(write(tmp_path / "h.json", [good, good | {"_id": "b"} | change])))


def test_sentences_are_joined_with_one_space():
    assert join_sentences(["One.", " Two.", "Three.", "", " ", "Four. ", "Five."]) == "One. Two. Three. Four. Five."
    assert join_sentences([]) == ""


def test_ids_name_the_title_and_tell_texts_apart():
    one = document_id(Paragraph("A  b\nc", "x"))
    assert re.fullmatch(r"A_b_c-[0-9a-f]{12}", one)
    assert len({one, document_id(Paragraph("A  b\nc", "y")), document_id(Paragraph("A", "  b\ncx"))}) == 3
    # Titles that begin alike, where title and text run together to the same characters.
    assert document_id(Paragraph("t" * 60, "ab")) != document_id(Paragraph("t" * 60 + "a", "b"))
    assert len(document_id(Paragraph("t" * 500, "x"))) == 73


def test_equal_paragraphs_are_one_document(tmp_path):
    """A of the first question is gold for both, and a distractor is gold elsewhere; their texts decide."""
    rows = [musique(), musique("2hop__3_4", (2, 1)), musique("2hop__5_6")]
    rows[2]["paragraphs"][0]["paragraph_text"] = "another text under the same title"
    files = {
        "train": write(tmp_path / "m_train.jsonl", rows[:1]),
        "dev": write(tmp_path / "m_dev.jsonl", rows[1:]),
    }
    task = prep_multihop("musique", files, tmp_path / "both")
    assert [(n.title, n.text) for n in task.corpus] == [
        ("A", "text A"),
        ("B", "text B"),
        ("C", "text C"),
        ("A", "another text under the same title"),
    ]
    a, b, c, other = (node.id for node in task.corpus)
    assert task.qrels("train") == {"2hop__1_2": {b: 1, a: 1}}
    assert task.qrels("dev") == {"2hop__3_4": {c: 1, b: 1}, "2hop__5_6": {b: 1, other: 1}}
    assert {q: (chain.gold, chain.distractors) for q, chain in task.chains("dev").items()} == {
        "2hop__3_4": ((c, b), (a,)),
        "2hop__5_6": ((b, other), (c,)),
    }
    assert task.answers("dev") == {"2hop__3_4": "!", "2hop__5_6": "!"}
    assert report(task)[0] == "4 documents; 5 equal paragraphs were merged into them"
    # Prepared alone, a split has its own corpus, and the same ids in it.
    alone = prep_multihop("musique", {"train": files["train"]}, tmp_path / "alone")
    assert [node.id for node in alone.corpus] == [a, b, c]


def test_a_copy_of_a_gold_paragraph_is_no_distractor(tmp_path):
    row = musique(number=4)
    row["paragraphs"][3] |= {"title": "A", "paragraph_text": "text A"}
    [question] = read_musique(write(tmp_path / "m.jsonl", [row]))
    assert [p.title for p in question.others] == ["C"] and len(question.paragraphs) == 3


def test_a_pool_instead_of_or_beside_the_paragraphs(tmp_path):
    file = write(tmp_path / "m_dev.jsonl", [musique()])
    passages = [("A", "text A"), ("P", "pool"), ("", " "), ("C", "text C")]
    pool = write(tmp_path / "m_corpus.json", [{"title": title, "text": text} for title, text in passages])
    assert len(list(read_pool(pool))) == 3
    task = prep_multihop("musique", {"dev": file}, tmp_path / "pool", corpus="pool", pool=pool)
    assert [node.title for node in task.corpus] == ["A", "P", "C"]
    [chain] = task.chains("dev").values()
    assert (chain.gold[1], chain.distractors) == (task.corpus.id(0), (task.corpus.id(2),))
    assert task.manifest["source"]["statistics"]["splits"]["dev"]["missing_gold"] == 1
    both = prep_multihop("musique", {"dev": file}, tmp_path / "both", corpus="both", pool=pool)
    assert [node.title for node in both.corpus] == ["A", "B", "C", "P"]
    assert report(both)[0].endswith("2 equal paragraphs were merged into them")
    for wrong in ({"corpus": "pool"}, {"pool": pool}, {"corpus": "half"}):
        with pytest.raises(ValueError, match="corpus="):
            prep_multihop("musique", {"dev": file}, tmp_path / "no", **wrong)
    assert not (tmp_path / "no").exists()


FILES = {
    "musique": ("musique", "musique_ans_v1.0_train_sample100.jsonl.gz", "musique_ans_v1.0_dev_sample292.jsonl.gz"),
    "hotpotqa": ("hotpotqa", "hotpot_train_v1.1_sample100.json.gz", "hotpot_dev_distractor_v1_sample685.json.gz"),
    "2wiki": ("2wikimultihopqa", "train_sample500.json.gz", "dev_sample164.json.gz"),
}


def real_files(data_dir, dataset):
    folder, *names = FILES[dataset]
    return dict(zip(("train", "dev"), (data_dir / folder / name for name in names), strict=True))


def records(file):
    """Each record as (id, paragraphs in order, titles or texts of the gold ones), read the plain way."""
    with gzip.open(file, "rt", encoding="utf-8") as handle:
        rows = [json.loads(line) for line in handle] if ".jsonl" in file.name else json.load(handle)
    for row in rows:
        if "paragraphs" in row:
            texts = [(p["title"], p["paragraph_text"]) for p in row["paragraphs"]]
            steps = [step["paragraph_support_idx"] for step in row["question_decomposition"]]
            by_number = {p["idx"]: (p["title"], p["paragraph_text"]) for p in row["paragraphs"]}
            yield row["id"], texts, [by_number[step] for step in steps], row
        else:
            texts = [
                (title, " ".join(s.strip() for s in sentences if s.strip())) for title, sentences in row["context"]
            ]
            gold = []
            for title, _ in row["supporting_facts"]:
                found = next(text for text in texts if text[0] == title)
                if found not in gold:
                    gold.append(found)
            yield row["_id"], texts, gold, row


def plain(title, text):
    """What a text is but for white space, which joining sentences may add."""
    return title.strip(), re.sub(r"\s+", "", text)


@pytest.mark.parametrize("dataset", list(FILES))
def test_the_real_files_beside_a_slow_twin(data_dir, tmp_path, dataset):
    files = real_files(data_dir, dataset)
    task = prep_multihop(dataset, files, tmp_path / "task")
    node = {n.id: plain(n.title, n.text) for n in task.corpus}
    assert len(set(node.values())) == len(node)  # no text twice
    every = set()
    for split, file in files.items():
        twin = {qid: (texts, gold, row) for qid, texts, gold, row in records(file)}
        chains, qrels = task.chains(split), task.qrels(split)
        assert [(q.id, q.text) for q in task.queries(split)] == [(i, t[2]["question"].strip()) for i, t in twin.items()]
        for qid, (texts, gold, row) in twin.items():
            given = {plain(*text) for text in texts}
            right = [plain(*text) for text in gold]
            chain = chains[qid]
            assert Counter(node[d] for d in chain.gold) == Counter(right)
            assert {node[d] for d in chain.distractors} == given - set(right)
            assert qrels[qid] == dict.fromkeys(chain.gold, 1)
            assert chain.ordered == twin_order(dataset, row, [text[0] for text in gold], dict(reversed(texts)))[0]
            if chain.ordered:
                wanted = twin_order(dataset, row, [text[0] for text in gold], dict(reversed(texts)))[1]
                assert [task.corpus.title(task.corpus.row(d)) for d in chain.gold] == wanted
            every |= given
    assert set(node.values()) == every
    assert task.manifest["source"]["statistics"]["splits"]["dev"]["missing_gold"] == 0


def twin_order(dataset, row, titles, texts):
    """(ordered, titles in order), by other means than the reader's."""
    if dataset == "musique":
        return True, titles
    if row["type"] == "comparison":
        return False, titles
    if dataset == "2wiki":
        # In all of these records the supporting facts stand in the order of the evidences.
        return True, list(dict.fromkeys(title for title, _ in row["supporting_facts"]))

    def words(text):
        return re.findall(r"\w+|[^\w\s]", text)

    def holds(text, name):
        name, text = words(name), words(text)
        return any(text[i : i + len(name)] == name for i in range(len(text) - len(name) + 1))

    bare = [re.sub(r" \([^()]*\)$", "", title) for title in titles]
    for names, change in ((titles, str), (titles, str.lower), (bare, str.lower)):
        forward = holds(change(texts[titles[0]]), change(names[1]))
        backward = holds(change(texts[titles[1]]), change(names[0]))
        if forward != backward:
            return True, titles if forward else titles[::-1]
        if forward:
            break
    return False, titles


# BM25 over all paragraphs of train and dev together.
@pytest.mark.parametrize(
    ("dataset", "recall", "every"), [("musique", 0.472, 0.106), ("hotpotqa", 0.739, 0.507), ("2wiki", 0.72, 0.42)]
)
def test_bm25_finds_what_it_found(data_dir, tmp_path, dataset, recall, every):
    task = prep_multihop(dataset, real_files(data_dir, dataset), tmp_path / "task")
    result = evaluate_suite(BM25.from_corpus(task.corpus), task, get_suite(dataset))
    assert result.values["Recall@5"] == pytest.approx(recall, abs=0.02)
    assert result.values["All@5"] == pytest.approx(every, abs=0.03)
    assert result.evaluation.counts.dangling == 0
