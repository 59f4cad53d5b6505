"""From a trained state encoder to a folder that sentence-transformers, transformers and `retrail.load` open.

The folder holds the decoder with LoRA merged, the tokenizer with the end token among what it appends by itself, pooling
and normalisation as sentence-transformers has them, prompts, a model card, and `retrieval.json`: the contract, how to
search, training settings, data fingerprint, metrics, and probes with the vectors that a reloaded folder must give.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..models.backbone import merge_adapter
from ..models.config import RecurseConfig
from ..models.exports import read_export
from ..models.load import load_encoder
from ..models.protocols import State
from ..models.recursive.encoder import LocalEncoder
from ..models.recursive.pooling import decoder_of
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

# Least cosine of a vector before and after: merging LoRA into rounded weights, and reloading.
_MERGED = {"torch.float32": 0.9999, "torch.bfloat16": 0.995, "torch.float16": 0.999}
_RELOADED = {"torch.float32": 0.999999, "torch.bfloat16": 0.999, "torch.float16": 0.9999}
# Above this the trained model gives the vectors of the untrained one: a merge that changed nothing.
_SAME_AS_BASE = 0.999999


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts(Facts):
    """What the folder says of itself besides its weights."""

    recurse: RecurseConfig


def export_state(
    encoder: LocalEncoder, to: str | Path, facts: StateFacts, states: Sequence[State], documents: Sequence[str]
) -> Path:
    """Write the folder `to` and return it; the encoder's model loses its adapter to the merge.

    The folder is written beside `to`, reloaded by this package and by sentence-transformers, compared on the probes,
    and only then renamed.

    Raises:
        FileExistsError: `to` holds something that is no export.
        ValueError: no probes.
        ExportCheckError: merged or reloaded vectors differ from the model's, or the merge changed nothing.
    """
    target = Path(to)
    check_target(target)
    if not states or not documents:
        raise ValueError("an export needs at least one state and one document as probes, to compare their vectors")
    dtype = str(encoder.backbone.dtype)
    before = _vectors(encoder, states, documents)
    base = _base_vectors(encoder, states, documents)
    encoder.backbone = merge_adapter(encoder.backbone)
    after = _vectors(encoder, states, documents)
    _compare(before, after, _MERGED[dtype], "merging the adapter")
    if base is not None and _least_cosine(base, after) > _SAME_AS_BASE:
        raise ExportCheckError(
            "the merged model gives the vectors of the untrained one; the adapter's weights are lost"
        )
    return publish(
        target,
        lambda folder: _write(folder, encoder, facts, states, documents, after),
        lambda folder: check_state_export(folder, device=encoder.device.type),
    )


def check_state_export(folder: str | Path, *, device: str = "auto") -> float:
    """Reload with this package and with sentence-transformers; the least cosine to the stored vectors.

    Raises:
        FileNotFoundError, ExportError: it is no export, or not one for this version.
        ExportCheckError: a file is not the one that was written, or vectors differ by more than rounding explains.
    """
    folder = Path(folder)
    export = read_export(folder)
    export.need("recursive")
    manifest = export.manifest
    check_files(folder, manifest)
    stored = manifest["probes"]
    states = [State(s["query"], tuple(s["observed"]), s["role"], s["instruction"]) for s in stored["states"]]
    wanted = np.array(stored["vectors"], dtype=np.float32)
    encoder = load_encoder(folder, device=device, dtype=manifest["dtype"].removeprefix("torch."))
    least = _compare(wanted, _vectors(encoder, states, stored["documents"]), _RELOADED[manifest["dtype"]], "reloading")
    plain = _plain_vectors(folder, encoder, states, stored["documents"], manifest["dtype"])
    return min(least, _compare(wanted, plain, _RELOADED[manifest["dtype"]], "opening it with sentence-transformers"))


def _plain_vectors(
    folder: Path, encoder: LocalEncoder, states: Sequence[State], documents: Sequence[str], dtype: str
) -> np.ndarray:
    """What plain sentence-transformers makes of the same texts."""
    import torch
    from sentence_transformers import SentenceTransformer

    from ..models.recursive.prompts import render

    kind = getattr(torch, dtype.removeprefix("torch."))
    model = SentenceTransformer(str(folder), device=encoder.device.type, model_kwargs={"dtype": kind})
    texts = [render(encoder.prompts, state).text for state in states] + list(documents)
    return np.asarray(model.encode(texts, convert_to_numpy=True), dtype=np.float32)


def _vectors(encoder: LocalEncoder, states: Sequence[State], documents: Sequence[str]) -> np.ndarray:
    return np.concatenate([encoder.encode(states).vectors_SD, encoder.encode_documents(documents)])


def _base_vectors(encoder: LocalEncoder, states: Sequence[State], documents: Sequence[str]) -> np.ndarray | None:
    """Those of the model without its adapter; None where it has none."""
    backbone: Any = encoder.backbone
    if not hasattr(backbone, "disable_adapter"):
        return None
    with backbone.disable_adapter():
        return _vectors(encoder, states, documents)


def _least_cosine(one: np.ndarray, other: np.ndarray) -> float:
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def _compare(before: np.ndarray, after: np.ndarray, least: float, what: str) -> float:
    found = _least_cosine(before, after)
    if not found >= least:
        raise ExportCheckError(f"{what} turned a vector to a cosine of {found:.6f} with what it was, below {least}")
    return found


def _write(
    folder: Path,
    encoder: LocalEncoder,
    facts: StateFacts,
    states: Sequence[State],
    documents: Sequence[str],
    vectors: np.ndarray,
) -> None:
    _write_modules(folder, encoder)
    more = {
        "contract": {key: value for key, value in encoder.contract.items() if key not in ("source", "weights")},
        "encoder": asdict(encoder.config),
        "prompts": encoder.prompts.as_dict(),
        "recurse": asdict(facts.recurse),
        "probes": {"states": [asdict(s) for s in states], "documents": list(documents), "vectors": vectors.tolist()},
    }
    write_facts(folder, "recursive", str(encoder.backbone.dtype), facts, more, state_card(facts))


def _write_modules(folder: Path, encoder: LocalEncoder) -> None:
    """Weights and tokenizer, and around them what sentence-transformers reads."""
    decoder_of(encoder.backbone).save_pretrained(folder)
    tokenizer = _appending_tokenizer(encoder)
    tokenizer.save_pretrained(folder)
    pooling = {"last": "lasttoken", "mean": "mean"}[encoder.config.pooling]
    modules = "sentence_transformers.sentence_transformer.modules"
    chain = [("0", "", f"{modules}.Transformer"), ("1", "1_Pooling", f"{modules}.Pooling")]
    if encoder.config.normalise:
        chain.append(("2", "2_Normalize", f"{modules}.Normalize"))
        (folder / "2_Normalize").mkdir()
        _write_json(folder / "2_Normalize" / "config.json", {})
    listed = [{"idx": n, "name": name, "path": path, "type": kind} for n, (name, path, kind) in enumerate(chain)]
    _write_json(folder / "modules.json", listed)
    (folder / "1_Pooling").mkdir()
    hidden = int(decoder_of(encoder.backbone).config.get_text_config().hidden_size)
    _write_json(
        folder / "1_Pooling" / "config.json",
        {"embedding_dimension": hidden, "pooling_mode": pooling, "include_prompt": True},
    )
    # Texts, whatever chat template the tokenizer has.
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    longest = max(encoder.max_state_tokens, encoder.max_document_tokens)
    _write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": text,
            "module_output_name": "token_embeddings",
            "max_seq_length": longest,
        },
    )
    root = encoder.prompts.root
    head = encoder.prompts.head.format(instruction=root or "", query="") if root is not None else ""
    settings: dict[str, Any] = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
    settings |= {"prompts": {"query": head, "document": ""}, "default_prompt_name": None}
    if encoder.config.dimensions is not None:
        settings["truncate_dim"] = encoder.config.dimensions
    _write_json(folder / "config_sentence_transformers.json", settings)


def _appending_tokenizer(encoder: LocalEncoder) -> Any:
    """A copy of the tokenizer that puts begin tokens and the end token around a text by itself."""
    import copy

    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = copy.deepcopy(encoder.tokenizer.hf)
    names = {token: tokenizer.convert_ids_to_tokens(token) for token in (*encoder.end.begin, encoder.end.id)}
    around = [names[token] for token in encoder.end.begin], names[encoder.end.id]
    template = " ".join([*around[0], "$A", around[1]])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, pair=f"{template} $B {around[1]}", special_tokens=[(name, n) for n, name in names.items()]
    )
    # Padding must not be on the side where the last token is looked for by its place.
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = names[encoder.end.id]
    return tokenizer


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def state_card(facts: StateFacts) -> str:
    """The README.md of an export: front matter for the Hub, what it is, how to open it, its numbers."""
    base, link = base_model(facts)
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [retrail, retrieval, state-encoder]
{link}---
# {facts.name}

A state encoder that searches recursively (`retrail`, family `recursive`, search `{facts.recurse.strategy}`, readout
`{facts.recurse.readout}`), trained from `{base}`.

{usage(facts)}

`SentenceTransformer("{facts.name}")` opens it alone: `encode_query` puts the root instruction before a query, documents
are encoded as they are.

{numbers(facts)}
"""
