"""From a trained model to a folder that transformers, vLLM and `retrail.load` open; nothing is said done unseen.

The folder holds a plain Hugging Face checkpoint with LoRA merged, the tokenizer, the pointer head if there is one, a
model card, and `retrieval.json`: the contract of prompt and tokenizer, budgets, training settings, data fingerprint,
metrics, and probe slates with the answers that a reloaded folder must give.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..data_prep.files import new_folder, scratch_folder, sha256_file, swap_folder
from ..models.backbone import merge_adapter
from ..models.config import NavigateConfig
from ..models.decision.build import HEAD, contract, wrap_decision
from ..models.decision.layout import SlateLayout
from ..models.decision.model import DecisionModel
from ..models.decision.scorer import LocalScorer
from ..models.exports import FORMAT_VERSION, RETRIEVAL, read_export
from ..models.load import load_scorer
from ..models.protocols import Candidate, Slate

# What reloading may change (nothing but the order of sums), and what folding LoRA into rounded weights may.
_RELOAD_TOLERANCE = {"torch.float32": 1e-5, "torch.bfloat16": 2e-3, "torch.float16": 2e-3}
_MERGE_TOLERANCE = {"torch.float32": 1e-4, "torch.bfloat16": 0.1, "torch.float16": 0.02}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts:
    """What the folder says of itself besides its weights.

    training: the settings of the run; data: name and fingerprint of what it was trained on; metrics: numbers by name.
    """

    name: str
    navigate: NavigateConfig
    training: Mapping[str, Any]
    data: Mapping[str, str]
    metrics: Mapping[str, float]


class ExportCheckError(RuntimeError):
    """The written folder does not give the answers of the model it was written from."""


def check_target(to: str | Path) -> None:
    """Raise FileExistsError unless `to` is absent, an empty folder, or an export (which is then replaced)."""
    target = Path(to)
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise FileExistsError(f"{target} is no folder; choose another name")
    if any(target.iterdir()) and not (target / RETRIEVAL).is_file():
        raise FileExistsError(f"{target} exists and is no export of this toolkit; choose another folder")


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
    with scratch_folder(target) as scratch:
        folder = scratch / "export"
        with new_folder(folder) as written:
            _write(written, merged, layout, facts, probes, answers, drift)
        check_export(folder, device=str(model.device.type))
        if target.exists():
            swap_folder(folder, target, scratch / "old")
        else:
            folder.rename(target)
    return target


def check_export(folder: str | Path, *, device: str = "auto") -> float:
    """Read every file against its checksum, reload, answer the stored probes, and return the largest difference.

    Raises:
        FileNotFoundError, ExportError: it is no export, or not one for this version.
        ExportCheckError: a file is not the one that was written, does not load, or its answers differ by more than
            rounding explains.
    """
    folder = Path(folder)
    manifest = read_export(folder).manifest
    for name, written in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise ExportCheckError(f"{file} is missing; export again")
        if file.stat().st_size != written["bytes"] or sha256_file(file) != written["sha256"]:
            raise ExportCheckError(f"{file} is not the file that was exported; export again")
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
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in sorted(folder.iterdir())}
    manifest = {
        "family": "decision",
        "format_version": FORMAT_VERSION,
        "dtype": str(model.backbone.dtype),
        "contract": contract(layout),
        "navigate": asdict(facts.navigate),
        "training": facts.training,
        "data": facts.data,
        "metrics": facts.metrics,
        "merge_drift": drift,
        "files": files,
        "probes": [
            {**asdict(slate), "yes": yes.tolist(), "choice": choice.tolist()}
            for slate, (yes, choice) in zip(probes, answers, strict=True)
        ],
    }
    (folder / RETRIEVAL).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(facts, manifest), encoding="utf-8")


def model_card(facts: ExportFacts, manifest: Mapping[str, Any]) -> str:
    """The README.md of an export: front matter for the Hub, what it is, how to open it, its numbers."""
    base = str(facts.training.get("model", {}).get("path", "unknown"))
    # The Hub links to a base model of its own; a folder or packaged model has no page there.
    on_hub = base.count("/") == 1 and base[0].isalnum() and not Path(base).exists()
    link = f"base_model: {base}\n" if on_hub else ""
    rows = [f"| {name} | {value:.4f} |" for name, value in facts.metrics.items()]
    table = "\n".join(["| measure | value |", "|---|---|", *rows]) if rows else "No evaluation was run."
    return f"""---
library_name: transformers
pipeline_tag: text-ranking
tags: [retrail, retrieval, decision-model]
{link}---
# {facts.name}

A yes/no decision model that walks a corpus tree level by level (`retrail`, family `decision`,
head `{manifest["contract"]["decision"]["head"]}`), trained from `{base}`.

```python
import retrail

retriever = retrail.load("{facts.name}", corpus="path/to/prepared/folder")
hits = retriever.search(["your question"], k=5)
```

`AutoModelForCausalLM.from_pretrained` opens the weights alone (adapter merged). Prompt
`{manifest["contract"]["prompt"]["name"]}` version {manifest["contract"]["prompt"]["version"]}.

## Numbers

Data: {facts.data.get("name", "unknown")}, fingerprint `{facts.data.get("fingerprint", "unknown")[:16]}`.

{table}
"""
