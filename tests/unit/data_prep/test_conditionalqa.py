import json

import pytest

from retrail.data_prep.formats.conditionalqa import prep_conditionalqa

PAGE = {
    "title": "Tax",
    "url": "https://www.gov.uk/tax",
    "contents": [
        "<p>Intro &amp; more.</p>",
        "<h1>Rates</h1>",
        "<p></p>",
        "<h2>Low</h2>",
        "<li>5%</li>",
        "<h2>End</h2>",
    ],
}


def question(number, evidences, url="https://www.gov.uk/tax"):
    return {"id": f"d-{number}", "url": url, "scenario": "I work.", "question": "How  much?", "evidences": evidences}


def files(tmp_path, pages, questions):
    (tmp_path / "documents.json").write_text(json.dumps(pages))
    (tmp_path / "dev.json").write_text(json.dumps(questions))
    return tmp_path / "documents.json", {"dev": tmp_path / "dev.json"}, tmp_path / "out"


def test_tree_and_gold(tmp_path):
    asked = [
        question(0, ["<li>5%</li>", "<h1>Rates</h1>", "<p>gone</p>"]),
        question(1, ["<h2>End</h2>"]),
        question(2, [], "https://www.gov.uk/other"),
    ]
    task = prep_conditionalqa(*files(tmp_path, [PAGE], asked))
    assert [(n.id, n.parent, n.text) for n in task.corpus][1:] == [
        ("tax#0", "tax", "Intro & more."),
        ("tax#1", "tax", "Rates"),
        ("tax#3", "tax#1", "Low"),
        ("tax#5", "tax#1", "End"),
        ("tax#4", "tax#3", "5%"),
    ]
    assert task.qrels("dev") == {"d-0": {"tax#4": 1}, "d-1": {"tax#5": 1}}
    assert task.queries("dev")[0].text == "I work. How much?"
    assert task.manifest["source"]["counts"] == {
        "dev_questions_without_page": 1,
        "dev_evidences": 4,
        "dev_evidences_unmatched": 1,
        "dev_evidences_that_are_headings": 1,
    }


@pytest.mark.parametrize(
    ("pages", "match"),
    [
        ([PAGE, PAGE], r"\[1\]\['url'\]: page .* appears twice"),
        ([PAGE | {"contents": ["<p> </p>"]}], "has no text"),
        ([PAGE | {"contents": [1]}], r"\['contents'\]\[0\] must be a string"),
        ([PAGE | {"url": "https://www.gov.uk/else"}], "none of its questions"),
    ],
)
def test_bad_files(tmp_path, pages, match):
    with pytest.raises(ValueError, match=match):
        prep_conditionalqa(*files(tmp_path, pages, [question(0, [])]))
    assert not (tmp_path / "out").exists()


def test_real_dev(data_dir, tmp_path):
    folder = data_dir / "conditionalqa"
    questions = {"dev": folder / "v1_0" / "dev.json.gz"}
    task = prep_conditionalqa(folder / "documents.dev_partial59.json.gz", questions, tmp_path / "out")
    counts = task.manifest["source"]["counts"]
    assert counts["dev_evidences"] == 1165 and counts["dev_evidences_unmatched"] == 1
    assert len(task.corpus.children(None)) == 59 and len(task.queries("dev")) == 285
