"""Learning from the model's own query likelihood, without a single label."""

import json

import numpy as np
import pytest
import torch
from decision_toy import tiny_decision, toy_corpus, toy_queries, toy_task

from retrail.data_prep.task import Query, Task
from retrail.models.config import AdapterConfig
from retrail.models.decision.likelihood import QueryLikelihood
from retrail.scripts import train
from retrail.train.config import DecisionObjectiveConfig
from retrail.train.losses import distil_sum
from retrail.train.objectives.decision import gold_path_rows
from retrail.train.objectives.distil import DistilObjective, anchors

HEADS = pytest.mark.parametrize(("head", "queries"), [("pointer", 1), ("pointer", 3), ("yes_no", 1)])


def distil(head="pointer", queries=1, **config):
    """(model, objective) over the toy corpus."""
    order = "candidates_first" if queries > 1 else "query_first"
    model, layout = tiny_decision(head, AdapterConfig(rank=4), order=order)
    corpus = toy_corpus()
    asked, _ = toy_queries(corpus)
    settings = {"min_candidates": 3, "max_candidates": 6, "teacher": "likelihood", "queries": queries, **config}
    objective = DistilObjective(
        gold_path_rows(corpus, asked, anchors(corpus, asked)),
        corpus,
        layout,
        DecisionObjectiveConfig(**settings),
        QueryLikelihood(model.backbone, layout),
    )
    return model, objective


def test_anchors_are_what_bm25_finds_first():
    corpus = toy_corpus()
    found = anchors(corpus, [Query("a", "where is jam?"), Query("b", "zzz")])
    assert [corpus.title(corpus.row(node)) for node in found["a"]] == ["jam"] and found["b"] == {}


@HEADS
def test_labels_are_the_teachers_answers(head, queries):
    model, objective = distil(head, queries, teacher_temperature=0.25, teacher_yes=0.1)
    for row in (0, 5):
        example = objective.example(row, 1)
        assert example.slates == objective.shared(row, 1)[0]
        for slate, yes_C, odds_C in zip(example.slates, example.labels_NC, example.teacher_NC, strict=True):
            [read] = objective.teacher.read([slate])
            per_token = (read.sums_C - read.alone) / read.query_tokens
            assert odds_C == pytest.approx((per_token - 0.1) * 4, abs=1e-5)
            assert yes_C == pytest.approx(1 / (1 + np.exp(-odds_C)), abs=1e-6)
            assert np.ptp(yes_C) > 1e-4


@HEADS
def test_loss_is_that_of_slate_after_slate(head, queries):
    model, objective = distil(head, queries, teacher_temperature=0.05)
    rows = [(0, 0), (3, 0), (7, 1)]
    batch = objective.collate(rows)
    parts = objective.loss(model, batch)
    assert set(parts.sums) == set(objective.weights)
    total = 0.0
    for row, epoch in rows:
        example = objective.example(row, epoch)
        logits_Q, _ = model(objective.batch([example]).slates)
        N, C = example.labels_NC.shape
        for n in range(N):
            logits, odds = logits_Q[n * C : (n + 1) * C], torch.from_numpy(example.teacher_NC[n]).float()
            total += float(distil_sum(logits, odds, torch.zeros(C, dtype=torch.long), 1, torch.ones(1)))
    assert float(parts.sums["listwise"]) == pytest.approx(total, rel=1e-4)
    count = sum(len(objective.shared(*key)[0]) for key in rows)
    assert batch.counts["listwise"] == count and (head != "yes_no" or batch.counts["choice"] == count)


def test_the_teacher_stays_as_it_was_while_the_student_learns():
    model, objective = distil()
    before = objective.example(2, 0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model.train()
    for _ in range(2):
        parts = objective.loss(model, objective.collate([(2, 0)]))
        sum(parts.sums.values()).backward()
        optimizer.step()
    assert model.training
    after = objective.example(2, 0)
    assert np.array_equal(before.teacher_NC, after.teacher_NC) and np.array_equal(before.labels_NC, after.labels_NC)


@HEADS
def test_loss_falls(head, queries):
    model, objective = distil(head, queries, teacher_temperature=0.02, teacher_yes=0.0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.003)
    batch = objective.collate([(row, 0) for row in range(6)])
    losses = []
    for _ in range(60):
        sums = objective.loss(model, batch).sums
        loss = sum(objective.weights[name] * sums[name] / batch.counts[name] for name in sums if name != "bce")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def test_a_slate_without_any_yes_counts():
    _, objective = distil("yes_no", teacher_yes=1e6)
    batch = objective.collate([(0, 0), (1, 0)])
    assert not batch.labels_Q.any()
    assert batch.counts["listwise"] == batch.counts["choice"] == 2


def test_an_empty_batch_counts_nothing():
    model, objective = distil("yes_no")
    batch = objective.collate([])
    assert set(batch.counts.values()) == {0.0} and batch.names == ()
    assert all(float(value) == 0 for value in objective.loss(model, batch).sums.values())


def arguments(task, folder, *more):
    small = ["model=tiny", "runtime=cpu", "objective.queries=4", "objective.min_candidates=3", "loop.best_metric="]
    small += ["objective.max_candidates=6", "loop.batch_size=4", "loop.eval_every=0", "loop.save_every=2"]
    return ["name=x", f"data.path={task}", f"run_dir={folder}", "objective.teacher=likelihood", *small, *more]


def test_train_command_reads_no_label_and_resumes_exactly(tmp_path, monkeypatch):
    task = toy_task(tmp_path / "task").folder
    monkeypatch.delattr(Task, "qrels")
    fixed = "optim.schedule=constant", "optim.warmup_ratio=0"
    assert train.main(arguments(task, tmp_path / "whole", "loop.max_steps=4", *fixed)) == 0
    for steps in (2, 4):
        assert train.main(arguments(task, tmp_path / "parts", f"loop.max_steps={steps}", *fixed)) == 0
    logs = []
    for name in ("whole", "parts"):
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        logs.append([(json.loads(line)["step"], json.loads(line)["loss"]) for line in lines])
    assert logs[0] == logs[1] and len(logs[0]) == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["adapter=full"], "adapter.kind=full changes the model itself; set adapter.kind=lora"),
        (["objective.none_weight=1"], "objective.none_weight=1.0 needs labels; set it to 0.0"),
        (["objective.positive_weights=[2]"], "objective.positive_weights=[2.0] needs labels"),
        (["objective.teacher=oracle"], "objective.teacher='oracle' is not a choice; use one of: labels, likelihood"),
        (["objective.teacher_temperature=0"], "objective.teacher_temperature=0.0 must be above 0"),
    ],
)
def test_settings_that_cannot_be(tmp_path, capsys, more, message):
    assert train.main(arguments(tmp_path, tmp_path / "run", *more)) == 2
    assert message in capsys.readouterr().err
