"""`retrail static`, and searches that use what it wrote."""

import json

import pytest
import torch
from decision_toy import shake, tiny_decision, toy_corpus
from fakes import make_slate

from retrail.models.config import NavigateConfig
from retrail.models.decision.static import MANIFEST, StaticError
from retrail.models.load import load
from retrail.scripts import search, static
from retrail.train.export import ExportFacts, export_decision


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An exported retriever with the candidates first, and a corpus folder."""
    folder = tmp_path_factory.mktemp("static")
    model, layout = tiny_decision(order="candidates_first", max_candidates=6)
    shake(model)
    facts = ExportFacts(name="toy", navigate=NavigateConfig(keep=[9], choose=2), training={}, data={}, metrics={})
    export_decision(model, layout, folder / "export", facts, [make_slate(3)])
    toy_corpus().save(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def built(exported):
    assert static.main([*common(exported), f"to={exported / 'store'}"]) == 0
    return exported / "store"


def common(folder):
    return [f"retriever={folder / 'export'}", f"corpus={folder / 'corpus'}", "device=cpu"]


def test_says_what_it_stores(exported, tmp_path, capsys):
    assert static.main([*common(exported), f"to={tmp_path / 'store'}", "levels=1", "max_gb=1"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("level 1: 1 slates, 4 candidates, 0.") and first.endswith(" MB")
    assert last.endswith(f"use them with static={tmp_path / 'store'}") and ": 1 slates, 0." in last


def test_a_search_finds_the_same_and_reads_less(exported, built, capsys):
    request = [*common(exported), "query=where is jam?", "show=json"]
    hits = []
    for more in ([], [f"static={built}"]):
        assert search.main([*request, *more]) == 0
        hits.append(json.loads(capsys.readouterr().out))
    plain, stored = hits
    assert stored["ids"] == plain["ids"]
    assert stored["scores"] == pytest.approx(plain["scores"], abs=1e-6)
    assert "reused_tokens" not in plain["cost"] and stored["cost"]["reused_tokens"] > 0
    assert stored["cost"]["prompt_tokens"] < plain["cost"]["prompt_tokens"]


def test_load_takes_it(exported, built):
    [hits] = load(exported / "export", exported / "corpus", device="cpu", static=built).search(["where is jam?"], k=3)
    [plain] = load(exported / "export", exported / "corpus", device="cpu").search(["where is jam?"], k=3)
    assert hits.ids == plain.ids and hits.cost.reused_tokens > 0
    with pytest.raises(StaticError, match="corpus was .* when the slates were stored and is"):
        load(exported / "export", toy_corpus(5), device="cpu", static=built)
    cached = load(exported / "export", exported / "corpus", device="cpu", trunk_cache_bytes=10**7)
    costs = [cached.search(["where is jam?"], k=3)[0].cost.reused_tokens for _ in range(3)]
    assert costs[:2] == [0, 0] and costs[2] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["levels=3"], "there is no level 3: with everything open a walk ends at level 2"),
        (["levels=0"], "levels=0 must be above 0"),
        (["max_gb=0"], "max_gb=0.0 must be above 0"),
        (["max_gb=1e-6"], "max_gb is too small for the first slate"),
    ],
)
def test_requests_that_cannot_be(exported, tmp_path, capsys, arguments, message):
    assert static.main([*common(exported), f"to={tmp_path / 'store'}", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_finished_store_is_refused_before_the_model_is_loaded(exported, built, capsys):
    before = (built / MANIFEST).read_bytes()
    arguments = [f"retriever={exported / 'nowhere'}", f"corpus={exported / 'corpus'}", f"to={built}"]
    assert static.main(arguments) == 2
    assert "holds static slates already; remove it or choose another name" in capsys.readouterr().err
    assert (built / MANIFEST).read_bytes() == before


def test_a_retriever_without_slates_takes_none(exported, built, capsys):
    request = ["retriever=bm25", f"corpus={exported / 'corpus'}", "query=jam", f"static={built}"]
    assert search.main(request) == 2
    assert "has no meaning for retriever=bm25; leave it out" in capsys.readouterr().err


def test_weights_of_another_export_are_refused(exported, built, tmp_path, capsys):
    model, layout = tiny_decision(order="candidates_first", max_candidates=6)
    with torch.no_grad():
        model.head.query.weight[0, 0] += 1e-3
    facts = ExportFacts(name="toy", navigate=NavigateConfig(), training={}, data={}, metrics={})
    export_decision(model, layout, tmp_path / "export", facts, [make_slate(3)])
    request = [f"retriever={tmp_path / 'export'}", f"corpus={exported / 'corpus'}", "device=cpu", "query=jam"]
    assert search.main([*request, f"static={built}"]) == 2
    assert "model was" in capsys.readouterr().err
