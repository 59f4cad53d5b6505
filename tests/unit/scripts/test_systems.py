"""Retrievers by name, and descriptions that tell evaluations apart."""

import dataclasses
import math

import pytest
import torch
from decision_toy import tiny_decision, toy_corpus
from fakes import FakeScorer, make_slate

from retrail.models.config import NavigateConfig, PriceConfig
from retrail.models.decision.calibration import Calibration, LevelThreshold, walk_settings, write_calibration
from retrail.models.decision.likelihood import QueryLikelihood
from retrail.models.decision.navigate import Navigator
from retrail.models.decision.slates import node_candidate
from retrail.models.load import load
from retrail.models.protocols import Slate
from retrail.scripts.systems import VARIANTS, controls, settings_text
from retrail.train.export import ExportFacts, export_decision


def test_every_setting_of_a_walk_changes_its_description(tmp_path):
    changed = {
        "search": {"search": "best_first", "max_tokens": 9},
        "budget": {"budget": "share"},
        "calibration": None,
        "slate_temperature": {"slate_temperature": [0.0, 0.1]},
        "scoring": {"scoring": "fixed"},
        "price": None,
    }
    seen = {settings_text(NavigateConfig())}
    for field in dataclasses.fields(NavigateConfig):
        settings = changed.get(field.name, ...)
        if settings is None:
            continue
        if settings is ...:
            value = getattr(NavigateConfig(), field.name)
            new = [0.3] if isinstance(value, list) else not value if isinstance(value, bool) else (value or 0) + 2
            settings = {field.name: [3] if field.name == "keep" else new}
        text = settings_text(NavigateConfig(**settings))
        assert text not in seen, field.name
        seen.add(text)
    assert settings_text(NavigateConfig(price=PriceConfig(prompt=3.0))) in seen  # found is the same
    file = tmp_path / "c.json"
    texts = set()
    for threshold in (0.5, 0.6):
        levels = (LevelThreshold(score="gap", threshold=threshold, alpha=0.1, queries=20),)
        walk = walk_settings(NavigateConfig())
        write_calibration(file, Calibration(0.1, "any", levels, "r", "c", walk))
        texts.add(settings_text(NavigateConfig(budget="calibrated", calibration=str(file))))
    assert len(texts) == 2  # by what the file says, not by its name


def test_controls_change_one_setting():
    corpus = toy_corpus()
    scorer = FakeScorer(lambda q, c: 0.5)
    navigator = Navigator(scorer, corpus, NavigateConfig(keep=[2], choose=0))
    for name, scoring in (("flat", "shared"), ("page_by_page", "page_by_page"), ("pointwise", "pointwise")):
        [(title, walk, description)] = controls([name], corpus, navigator, "folder", "model")
        assert title == f"navigation, {name.replace('_', ' ')}" and description == f"{name} model"
        assert (walk.config.start_level, walk.config.scoring, walk.config.keep) == (0, scoring, [2])
        assert walk.search(["q"], k=3)
    [(title, walk, _)] = controls(["hybrid_bm25"], corpus, navigator, "folder", "model")
    assert title == "navigation, hybrid with bm25"
    assert "join" in [step.name for step in walk.search(["where is fig?"], k=3)[0].trace]
    with pytest.raises(ValueError, match="needs a decision model"):
        next(controls(["flat"], corpus))


def test_flat_begins_with_the_parents_of_leaves():
    class Deep:
        num_levels = 4

    assert VARIANTS["flat"](Deep()) == {"start_level": 2}


def test_likelihood_reads_with_the_base_model(tmp_path):
    corpus = toy_corpus()
    model, layout = tiny_decision(head="yes_no")
    training = {"model": {"path": "tiny:llama", "dtype": "float32"}}
    facts = ExportFacts(name="toy", navigate=NavigateConfig(), training=training, data={}, metrics={})
    likely = QueryLikelihood(model.backbone, layout)
    query = "jam is on page 2"
    candidates = [node_candidate(corpus, row) for row in corpus.leaves()]
    gains = likely.read([Slate(query, tuple(candidates))])[0].gains_C
    expected = {c.id: 1 / (1 + math.exp(-gain)) for c, gain in zip(candidates, gains, strict=True)}
    with torch.no_grad():
        model.backbone.get_input_embeddings().weight.mul_(-0.5)  # the export is another model than its base
    export_decision(model, layout, tmp_path / "export", facts, [make_slate(3)])
    folder = str(tmp_path / "export")
    navigator = load(folder, corpus, device="cpu")
    [(title, retriever, description)] = controls(["likelihood"], corpus, navigator, folder, "model")
    assert (title, description) == ("query likelihood on BM25's 100", "likelihood 100 model")
    [hits] = retriever.search([query], k=3)
    assert hits.ids and dict(zip(hits.ids, hits.scores, strict=True)) == pytest.approx(
        {node: expected[node] for node in hits.ids}, abs=1e-6
    )
    assert len(hits.trace) == 1 and set(hits.trace[0].ids) <= set(expected)
