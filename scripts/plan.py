"""`retrail plan`: what a training run will take, from a model without weights and batches of the real data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cli import run_command
from .config import PlanRun

if TYPE_CHECKING:
    from rich.table import Table

    from ..data_prep.task import Task
    from ..models.decision.batch import SlateBatch
    from ..models.decision.layout import SlateLayout
    from ..models.decision.model import DecisionModel
    from ..train.memory import Activations, Held
    from ..train.objectives.decision import DecisionBatch


@dataclass(frozen=True, slots=True)
class Drawn:
    """Microbatches of the first steps: how many, their most tokens (padding included), longest slate, label tokens."""

    microbatches: int
    tokens: int
    slate: int
    label_rows: int


def run(run: PlanRun) -> int:
    """Build, count, draw, estimate, print.

    Raises:
        ValueError: a family that no plan is known for, or adapter.kind=qlora, whose 4-bit weights are made from real
            ones.
    """
    if run.family != "decision":
        raise ValueError(f"family={run.family}: a plan knows decision models alone so far")
    if run.adapter.kind == "qlora":
        raise ValueError("adapter.kind=qlora: 4-bit weights cannot be made without the real ones; plan with lora")
    import torch
    from rich.console import Console

    from ..data_prep.task import Task
    from ..models.architectures import empty_backbone, tokenizer_at_hand
    from ..models.decision.build import assemble
    from ..train.memory import Activations, Held

    task = Task.open(run.data.path)
    backbone = empty_backbone(run.model)
    tokenizer, own = tokenizer_at_hand(run.model)
    with torch.device("meta"):
        model, layout = assemble(backbone, tokenizer, run.decision, run.adapter)
    print(parameters_line(run, model))
    drawn = draw_batches(run, task, layout, own)
    number_bytes = 2 if run.runtime.mixed_precision != "no" else backbone.dtype.itemsize
    mixed = run.runtime.mixed_precision != "no"
    shape = Activations.of(model.backbone, backbone.config, mixed=mixed, number_bytes=number_bytes)
    console = Console() if sys.stdout.isatty() else Console(width=max(120, Console().width))
    console.print(memory_table(run, Held.of(model), shape, drawn))
    print("the loop trains with ddp; the other rows say what sharding would save")
    return 0


def parameters_line(run: PlanRun, model: DecisionModel) -> str:
    """How many parameters there are, and how many train."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total, trained = sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
    return (
        f"{run.model.path} with adapter.kind={run.adapter.kind} and decision.head={run.decision.head}: "
        f"{total:,} parameters, {trained:,} train ({trained / total:.2%})"
    )


def draw_batches(run: PlanRun, task: Task, layout: SlateLayout, own: bool) -> Drawn:
    """The batches of the first steps on one rank, collated as training does, with a line printed for each step."""
    from ..train.sampler import Sampler
    from .rows import build_objective

    objective, _ = build_objective(run, task, layout)
    sampler = Sampler(
        num_rows=objective.num_rows,
        length=objective.length,
        seed=run.loop.seed,
        batch_size=run.loop.batch_size,
        max_tokens=run.loop.max_tokens,
    )
    whose = "" if own else " of SmolLM2's tokenizer (the model's own is not on this machine)"
    print(f"{objective.num_rows:,} rows an epoch; tokens are counted in tokens{whose}")
    seen: list[DecisionBatch] = []
    for step in range(run.steps):
        [plan] = sampler.plan(step, 1)
        batches: list[DecisionBatch] = [objective.collate(rows) for rows in plan]  # type: ignore[misc]
        seen += batches
        tokens, padded = (sum(getattr(b, key) for b in batches) for key in ("num_tokens", "num_padded_tokens"))
        print(f"step {step + 1}: {run.loop.batch_size} rows in {len(plan)} microbatches, {tokens:,} tokens", end="")
        print(f" ({1 - tokens / padded:.1%} padding)")
    return Drawn(
        microbatches=len(seen),
        tokens=max(batch.num_padded_tokens for batch in seen),
        slate=max(part.trunk_ST.shape[1] + part.branch_SL.shape[1] for batch in seen for part in _parts(batch)),
        label_rows=max(int((b.choices.label_pos_BK >= 0).sum()) if b.choices else 0 for b in seen),
    )


def _parts(batch: DecisionBatch) -> list[SlateBatch]:
    return [batch.slates, *([batch.choices] if batch.choices else [])]


def memory_table(run: PlanRun, held: Held, shape: Activations, drawn: Drawn) -> Table:
    """One row for each runtime and number of GPUs: gigabytes on each GPU, and which GPUs that fits.

    Activations are those of the largest microbatch seen, or of `loop.max_tokens`, whichever is more.
    """
    from rich.table import Table

    from ..train.memory import GPUS, RUNTIMES, fits

    tokens = max(drawn.tokens, run.loop.max_tokens)
    ways = {
        with_it: shape.bytes(tokens, drawn.slate, checkpointing=with_it, label_rows=drawn.label_rows)
        for with_it in (True, False)
    }
    chosen = run.runtime.activation_checkpointing
    table = Table(title=f"GB on each GPU, microbatches of {tokens:,} tokens (slates to {drawn.slate:,})")
    for title in ("runtime", "GPUs", "model and optimiser", "activations, checkpointed", "all of them", *GPUS):
        table.add_column(title, justify="left" if title == "runtime" else "right")
    for world in run.world_sizes:
        for runtime in RUNTIMES if world > 1 else ("single",):
            own = held.per_gpu(runtime, world)
            room = {name for name in fits(own + ways[chosen])}
            other = {name for name in fits(own + min(ways.values()))}
            table.add_row(
                runtime,
                str(world),
                *(f"{number / 1e9:,.1f}" for number in (own, ways[True], ways[False])),
                *("fits" if name in room else "checkpointed" if name in other else "no" for name in GPUS),
            )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(PlanRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
