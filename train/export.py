"""From a trained model to a folder that transformers, vLLM and `retrail.load` open; nothing is said done unseen.

The folder holds a plain Hugging Face checkpoint with LoRA merged, the tokenizer, the pointer head if there is one, a
model card, and `retrieval.json`: the contract of prompt and tokenizer, budgets, training settings, data fingerprint,
metrics, and probe slates with the answers that a reloaded folder must give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..models.backbone import merge_adapter
from ..models.config import NavigateConfig
from ..models.decision.build import HEAD, contract, wrap_decision
from ..models.decision.layout import SlateLayout
from ..models.decision.model import DecisionModel
from ..models.decision.scorer import LocalScorer
from ..models.exports import read_export
from ..models.load import load_scorer
from ..models.protocols import Candidate, Slate
from .export_folder import (
    ExportCheckError,
    Facts,
    base_model,
    check_files,
    check_target,
    numbers,
    publish,
    usage,
    write_facts,
)

# What reloading may change (nothing but the order of sums), and what folding LoRA into rounded weights may.
_RELOAD_TOLERANCE = {"torch.float32": 1e-5, "torch.bfloat16": 2e-3, "torch.float16": 2e-3}
_MERGE_TOLERANCE = {"torch.float32": 1e-4, "torch.bfloat16": 0.1, "torch.float16": 0.02}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts(Facts):
    """What the folder says of itself besides its weights."""

    navigate: NavigateConfig


def export_decision(
    model: DecisionModel, layout: SlateLayout, to: str | Path, facts: ExportFacts, probes: Sequence[Slate]
) -> Path:
    """Write the folder `to` and return it; `model` loses its adapter to the merge.

    The folder is written beside `to`, reloaded, compared on `probes`, and only then renamed. An export that is there
    already stays until then.

    Raises:
        FileExistsError: `to` holds something that is no export.
        ValueError: no probes, without which nothing could be compared.
        ExportCheckError: merged or reloaded answers differ from the model's.
    """
    target = Path(to)
    check_target(target)
    if not probes:
        raise ValueError("an export needs at least one probe slate, to compare its answers")
    before = _answers(model, layout, probes)
    dtype = str(model.backbone.dtype)
    merged = wrap_decision(merge_adapter(model.backbone), layout)
    if merged.head is not None and model.head is not None:
        merged.head.load_state_dict(model.head.state_dict())
    answers = _answers(merged, layout, probes)
    drift = _compare(before, answers, _MERGE_TOLERANCE[dtype], "merging the adapter")
    return publish(
        target,
        lambda folder: _write(folder, merged, layout, facts, probes, answers, drift),
        lambda folder: check_export(folder, device=str(model.device.type)),
    )


def check_export(folder: str | Path, *, device: str = "auto") -> float:
    """Read every file against its checksum, reload, answer the stored probes, and return the largest difference.

    Raises:
        FileNotFoundError, ExportError: it is no export, or not one for this version.
        ExportCheckError: a file is not the one that was written, does not load, or its answers differ by more than
            rounding explains.
    """
    folder = Path(folder)
    manifest = read_export(folder).manifest
    check_files(folder, manifest)
    stored = manifest["probes"]
    slates = [Slate(p["query"], tuple(Candidate(**c) for c in p["candidates"])) for p in stored]
    try:
        scorer = load_scorer(folder, device=device, dtype=manifest["dtype"].removeprefix("torch."))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ExportCheckError(f"{folder} does not load: {error}") from error
    again = [(y.values_C, c.values_C) for y, c in zip(scorer.yes(slates), scorer.choose(slates), strict=True)]
    answers = [(np.array(p["yes"]), np.array(p["choice"])) for p in stored]
    return _compare(answers, again, _RELOAD_TOLERANCE[manifest["dtype"]], f"reloading {folder}")


Answers = list[tuple[np.ndarray, np.ndarray]]


def _answers(model: DecisionModel, layout: SlateLayout, probes: Sequence[Slate]) -> Answers:
    scorer = LocalScorer(model, layout)
    return [(y.values_C, c.values_C) for y, c in zip(scorer.yes(probes), scorer.choose(probes), strict=True)]


def _compare(before: Answers, after: Answers, tolerance: float, what: str) -> float:
    worst = max(
        float(np.abs(b - a).max())
        for one, two in zip(before, after, strict=True)
        for b, a in zip(one, two, strict=True)
    )
    if not worst <= tolerance:
        raise ExportCheckError(f"{what} changed a probability by {worst:.3g}, more than {tolerance}")
    return worst


def _write(
    folder: Path,
    model: DecisionModel,
    layout: SlateLayout,
    facts: ExportFacts,
    probes: Sequence[Slate],
    answers: Answers,
    drift: float,
) -> None:
    model.backbone.save_pretrained(folder)
    layout.tokenizer.hf.save_pretrained(folder)
    if model.head is not None:
        save_file({k: v.contiguous() for k, v in model.head.state_dict().items()}, folder / HEAD)
    parts = contract(layout)
    more = {
        "contract": parts,
        "navigate": asdict(facts.navigate),
        "merge_drift": drift,
        "probes": [
            {**asdict(slate), "yes": yes.tolist(), "choice": choice.tolist()}
            for slate, (yes, choice) in zip(probes, answers, strict=True)
        ],
    }
    write_facts(folder, "decision", str(model.backbone.dtype), facts, more, model_card(facts, parts))


def model_card(facts: ExportFacts, parts: Mapping[str, Any]) -> str:
    """The README.md of an export: front matter for the Hub, what it is, how to open it, its numbers.

    parts: the contract of prompt and tokenizer.
    """
    base, link = base_model(facts)
    return f"""---
library_name: transformers
pipeline_tag: text-ranking
tags: [retrail, retrieval, decision-model]
{link}---
# {facts.name}

A yes/no decision model that walks a corpus tree level by level (`retrail`, family `decision`,
head `{parts["decision"]["head"]}`), trained from `{base}`.

{usage(facts)}

`AutoModelForCausalLM.from_pretrained` opens the weights alone (adapter merged). Prompt
`{parts["prompt"]["name"]}` version {parts["prompt"]["version"]}.

{numbers(facts)}
"""
