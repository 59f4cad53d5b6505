import gzip
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrail.data_prep.corpus import Node
from retrail.data_prep.formats.multidoc2dial import bucket, passage_text, prep_multidoc2dial
from retrail.data_prep.formats.multidoc2dial_passages import clean_title, gold_passages, split_words
from retrail.data_prep.task import qrels_at_level


def span(start, text, tag, title, section, **more):
    return {
        "start_sp": start,
        "end_sp": start + len(text),
        "text_sp": text,
        "tag": tag,
        "title": title,
        "id_sec": section,
        **more,
    }


def document(title, pieces, **more):
    """`pieces`: (text, tag, title, section, further fields)."""
    spans, text = {}, ""
    for number, (piece, tag, name, section, fields) in enumerate(pieces, start=1):
        spans[str(number)] = {"id_sp": str(number)} | span(len(text), piece, tag, name, section, **fields)
        text += piece
    return {"title": title, "doc_text": text, "spans": spans, **more}


PARENTS = {"parent_titles": [{"id_sp": "1", "text": "Top/Level", "level": "h2"}, {"text": "Middle#2"}]}
DOCS = {
    "dmv": {
        "Renew / now#3_0": document(
            "Renew / now#3",
            [
                ("Intro text here . ", "u", "Renew / now", "0", {}),
                ("\n\nFees \n", "h2", "Fees", "t_1", {}),
                ("The fee is twelve dollars. ", "u", "Fees", "1", {}),
                ("Pay it online\nor by mail. ", "u", "Fees", "1", {}),
                ("\n\nAlone \n", "h2", "Alone", "t_2", {}),
                ("\n\nDeep \n", "h3", "Deep", "t_3", PARENTS),
                ("Deep body of words. ", "u", "Deep", "3", {"parent_titles": []}),
            ],
        )
    },
    "va": {
        "Other doc#1_0": document("Other doc#1", [("The other document has one line. ", "u", "Other doc", "1", {})])
    },
}


def turn(number, role, utterance, references=(), da=None):
    row = {"turn_id": number, "role": role, "utterance": utterance, "references": list(references)}
    return row if da is None else row | {"da": da}


def multi(*spans, doc="Renew / now#3_0"):
    return [{"label": "solution", "id_sp": number, "doc_id": doc} for number in spans]


MULTI = {
    "dmv": [
        {
            "dial_id": "d1",
            "turns": [
                turn(1, "user", "How much\tis it?", multi("3"), "query_condition"),
                turn(2, "agent", "Twelve dollars.", multi("3", "4"), "respond_solution"),
                turn(3, "user", "And on the moon?", [], "query_condition"),
                turn(4, "agent", "I do not know.", [], "respond_no_solution"),
                turn(5, "user", "Elsewhere?", multi("1", doc="Other doc#1_0"), "query_solution"),
                turn(6, "agent", "See here.", multi("1", doc="Other doc#1_0"), "respond_solution"),
                turn(7, "user", "Two turns"),
                turn(8, "user", "of a user, then no reference?"),
                turn(9, "agent", "Hm.", [], "respond_solution"),
                turn(10, "user", "the last turn"),
            ],
        }
    ]
}
PLAIN = {
    "dmv": {
        "Renew / now#3_0": [
            {
                "dial_id": "d2",
                "turns": [
                    turn(1, "agent", "Hello"),
                    turn(2, "user", "Fee, please"),
                    turn(3, "agent", "More words?"),
                    turn(4, "user", "No."),
                    turn(5, "agent", "Yes.", [{"sp_id": "2"}, {"sp_id": "1"}]),
                    turn(6, "agent", None, [{"sp_id": "2"}]),
                ],
            }
        ]
    }
}


def write(tmp_path, name, key, data, zipped=False):
    raw = json.dumps({key: data}).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if zipped else raw)
    return tmp_path / name


def prep(tmp_path, dialogues=MULTI, docs=DOCS, out="out", **settings):
    doc_file = write(tmp_path, "doc.json", "doc_data", docs)
    dial_file = write(tmp_path, "dial.json.gz", "dial_data", dialogues, zipped=True)
    settings.setdefault("buckets", {"train": range(10)})
    return prep_multidoc2dial(doc_file, [dial_file], tmp_path / out, **settings)


RENEW = "Renew_/_now#3_0"


def test_sections(tmp_path):
    corpus = prep(tmp_path).corpus
    assert [corpus.id(row) for row in corpus.level_rows(0)] == ["dmv", "va"]
    assert corpus.title(0) == "Department of Motor Vehicles"
    assert corpus.text(0) == "1 documents, such as: Renew - now"
    document_row = corpus.row(RENEW)
    assert corpus.title(document_row) == "Renew - now"
    assert corpus.text(document_row) == (
        "Intro text here . The fee is twelve dollars. Pay it online or by mail. Deep body of words. ... "
        "Sections: Fees; Alone; Deep"
    )
    passages = [corpus.node(row) for row in corpus.children(document_row)]
    assert [(p.id, p.title, p.text) for p in passages] == [
        (f"{RENEW}::0", "Renew - now", "Intro text here ."),
        (f"{RENEW}::1", "Renew - now / Fees", "The fee is twelve dollars. Pay it online or by mail."),
        (f"{RENEW}::2", "Renew - now / Alone", "Alone"),
        (f"{RENEW}::3", "Top-Level / Middle / Deep", "Deep body of words."),
    ]
    assert passage_text(passages[1]) == "Renew - now / Fees // The fee is twelve dollars. Pay it online or by mail."
    assert passage_text(Node("x", None, "", "text alone")) == "text alone"


def test_queries_of_multidoc2dial(tmp_path):
    task = prep(tmp_path)
    assert [(query.id, query.text) for query in task.queries("train")] == [
        ("d1_1", "How much is it?[SEP]"),
        (
            "d1_5",
            "Elsewhere?[SEP]agent: I do not know.||user: And on the moon?"
            "||agent: Twelve dollars.||user: How much is it?",
        ),
        (
            "d1_8",
            "of a user, then no reference?[SEP]user: Two turns||agent: See here.||user: Elsewhere?"
            "||agent: I do not know.||user: And on the moon?||agent: Twelve dollars.||user: How much is it?",
        ),
    ]
    qrels = task.qrels("train")
    assert qrels == {"d1_1": {f"{RENEW}::1": 1}, "d1_5": {"Other_doc#1_0::0": 1}, "d1_8": {}}
    assert task.manifest["splits"]["train"]["queries_without_gold"] == 1
    assert qrels_at_level(qrels, task.corpus, 1)["d1_1"] == {RENEW: 1}


def test_queries_of_doc2dial(tmp_path):
    """No `da`: an agent turn answers if it has references. Spans 1 to 2 run over two sections: two gold passages."""
    task = prep(tmp_path, PLAIN)
    [query] = task.queries("train")
    assert (query.id, query.text) == ("d2_4", "No.[SEP]agent: More words?||user: Fee, please||agent: Hello")
    assert task.qrels("train") == {"d2_4": {f"{RENEW}::0": 1, f"{RENEW}::1": 1}}


def test_without_the_domain_level(tmp_path):
    corpus = prep(tmp_path, domain_level=False).corpus
    assert corpus.num_levels == 2
    assert [corpus.id(row) for row in corpus.children(None)] == [RENEW, "Other_doc#1_0"]


def test_token_passages(tmp_path):
    task = prep(tmp_path, segmentation="token", words=5)
    corpus = task.corpus
    passages = [corpus.node(row) for row in corpus.children(corpus.row(RENEW))]
    text = DOCS["dmv"]["Renew / now#3_0"]["doc_text"]
    pieces = text.split(" ")
    expected = [" ".join(" ".join(pieces[i : i + 5]).split()) for i in range(0, len(pieces), 5)]
    assert [p.text for p in passages] == [piece for piece in expected if piece]
    assert {p.title for p in passages} == {""}
    gold = [corpus.text(corpus.row(node_id)) for node_id in task.qrels("train")["d1_1"]]
    assert gold == ["The fee is twelve dollars.", "Pay it online or by mail."]


def test_buckets_and_files_make_the_splits(tmp_path):
    number = int(hashlib.sha1(b"d1").hexdigest(), 16) % 10
    assert bucket("d1") == number
    task = prep(tmp_path, buckets={"dev": [number], "train": [(number + 1) % 10]})
    assert task.splits == ("dev",)
    with pytest.raises(ValueError, match="has no splits"):
        prep(tmp_path, buckets={"train": [(number + 1) % 10]}, out="none")
    files = {
        "train": write(tmp_path, "a.json", "dial_data", PLAIN),
        "validation": write(tmp_path, "b.json", "dial_data", MULTI),
    }
    task = prep_multidoc2dial(tmp_path / "doc.json", files, tmp_path / "files")
    assert task.splits == ("train", "validation")
    assert [len(task.queries(split)) for split in task.splits] == [1, 3]


def changed(path, value):
    """MULTI or DOCS with one value replaced (or removed, for `...`)."""
    data = json.loads(json.dumps({"docs": DOCS, "dialogues": MULTI}))
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


SPAN = ("docs", "dmv", "Renew / now#3_0", "spans", "3")
TURN = ("dialogues", "dmv", 0, "turns", 1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            (*SPAN, "id_sec"),
            ...,
            r"doc\.json: doc_data\['dmv'\]\['Renew / now#3_0'\]\['spans'\]\['3'\] has no key 'id_sec'",
        ),
        ((*SPAN, "end_sp"), 9_999, r"\['3'\]: start_sp 26 and end_sp 9999 do not lie in doc_text of"),
        ((*SPAN, "start_sp"), "27", r"\['start_sp'\] must be an integer, not a string"),
        (("docs", "dmv"), [], r"doc_data\['dmv'\] must be an object, not an array"),
        (("docs", "dmv", "Renew / now#3_0", "doc_text"), None, r"\['doc_text'\] must be a string, not null"),
        ((*TURN, "role"), ..., r"dial\.json\.gz: dial_data\['dmv'\]\[0\]\['turns'\]\[1\] has no key 'role'"),
        (
            (*TURN, "references", 0, "id_sp"),
            "77",
            r"\['references'\]\[0\]: document 'Renew / now#3_0' has no span '77'",
        ),
        ((*TURN, "references", 0, "doc_id"), "gone", r"query 'd1_1': document 'gone' is not in the document file"),
        (("dialogues", "dmv", 0, "dial_id"), 3, r"dial_data\['dmv'\]\[0\]\['dial_id'\] must be a string"),
        (("dialogues", "dmv"), "x", r"dial_data\['dmv'\] must be an array, not a string"),
    ],
)
def test_bad_files_are_named(tmp_path, path, value, message):
    data = changed(path, value)
    with pytest.raises(ValueError, match=message):
        prep(tmp_path, data["dialogues"], data["docs"])
    assert not (tmp_path / "out").exists()


def test_missing_documents_can_be_skipped(tmp_path):
    data = changed((*TURN, "references", 0, "doc_id"), "gone")
    task = prep(tmp_path, data["dialogues"], skip_missing=True)
    assert [query.id for query in task.queries("train")] == ["d1_5", "d1_8"]
    assert task.manifest["source"]["turns_without_document"] == 1


def test_bad_settings_and_wrong_files(tmp_path):
    for settings, message in [
        ({"segmentation": "page"}, "segmentation='page' is not a choice"),
        ({"words": 0}, "words=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            prep(tmp_path, **settings)
    with pytest.raises(ValueError, match=r"doc\.json has no key 'dial_data' \(it has: 'doc_data'\)"):
        prep_multidoc2dial(tmp_path / "doc.json", [tmp_path / "doc.json"], tmp_path / "out")
    with pytest.raises(ValueError, match="the corpus is empty"):
        prep(tmp_path, {}, {})


def test_clean_title():
    assert clean_title(" A / B#3_0 ") == "A - B"
    assert clean_title("Form #12 ") == "Form"
    assert clean_title("C# and more") == "C# and more"


def test_split_words_drops_blank_pieces():
    assert [p.text for p in split_words("a b   c\nd e", 2)] == ["a b", "c d e"]


def squeeze(text):
    return "".join(text.lower().split())


def brute_force_gold(grounding, sources):
    """The published search: every start, growing ends; one passage wins at once, else the last start that works."""
    wanted = squeeze(grounding)
    wanted = wanted[3:-3] if len(wanted) >= 12 else wanted
    mapping = []
    for start in range(len(sources)):
        for end in range(start + 1, len(sources) + 1):
            if wanted and wanted in squeeze("".join(sources[start:end])):
                if end == start + 1:
                    return [start]
                mapping = list(range(start, end))
                break
    return mapping


@given(st.lists(st.text("aB ", max_size=9), max_size=6), st.text("ab ", max_size=16))
def test_gold_as_the_published_search(sources, grounding):
    assert gold_passages(grounding, sources) == brute_force_gold(grounding, sources)


def test_gold_by_hand():
    sources = ["Alpha beta gamma.", "Delta epsilon zeta eta.", "Theta iota kappa lambda."]
    assert gold_passages("delta  EPSILON\nzeta", sources) == [1]
    assert gold_passages("gamma. Delta epsilon zeta eta. Theta", sources) == [0, 1, 2]
    assert gold_passages("xxDelta epsilon zeta eta.xx", sources) == [1]
    assert gold_passages("not in any of the passages", sources) == []
    assert gold_passages("", sources) == []
    assert gold_passages("a", ["b", "A", "a"]) == [1]


def test_real_doc2dial(data_dir, tmp_path):
    raw = data_dir / "doc2dial_multidoc2dial"
    arguments = raw / "doc2dial_doc.val273.rebuilt.json.gz", [raw / "doc2dial_dial_validation.rebuilt.json.gz"]
    task = prep_multidoc2dial(*arguments, tmp_path / "structure")
    corpus = task.corpus
    assert [len(corpus.level_rows(level)) for level in range(3)] == [4, 273, 2_203]
    assert [len(task.queries(split)) for split in ("train", "dev")] == [3_177, 365]
    assert all(len(gold) == 1 for split in task.splits for gold in task.qrels(split).values())
    token = prep_multidoc2dial(*arguments, tmp_path / "token", segmentation="token")
    assert all(token.qrels("dev").values())


def test_real_multidoc2dial(data_dir, tmp_path):
    raw = data_dir / "doc2dial_multidoc2dial" / "official"
    files = {split: raw / f"multidoc2dial_dial_small_{split}.json" for split in ("train", "validation")}
    task = prep_multidoc2dial(raw / "multidoc2dial_doc_small.json.gz", files, tmp_path / "out", skip_missing=True)
    assert {split: len(task.queries(split)) for split in task.splits} == {"train": 10, "validation": 9}
    assert all(task.qrels("validation").values())
    assert task.manifest["source"]["turns_without_document"] == 48
