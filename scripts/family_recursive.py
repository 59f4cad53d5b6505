"""RDR in the commands: build, train, measure and export a state encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .config import TrainRun
from .families import Built

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..data_prep.state_rows import StateRows, WrongDocuments
    from ..data_prep.task import Query, Task
    from ..eval.suites import Suite
    from ..models.protocols import State
    from ..models.recursive.encoder import LocalEncoder
    from ..train.evaluation import Evaluate
    from ..train.objectives.base import Objective

_PROBES = 8


class RecursiveFamily:
    """A `Family`; its renderer is a `LocalEncoder` over the model that is trained."""

    def build(self, run: TrainRun, device: torch.device, *, to_merge: bool = False) -> Built:
        """The encoder of the settings."""
        from ..models.backbone import add_adapter, load_backbone
        from ..models.recursive.encoder import LocalEncoder
        from ..models.recursive.prompts import open_prompts
        from ..models.recursive.state_model import StateModel

        four_bit, adapter = run.adapter.kind == "qlora", run.adapter
        backbone, tokenizer = load_backbone(run.model, device, four_bit=four_bit, lm_head=False)
        if four_bit and to_merge:
            backbone, adapter = backbone.dequantize(), replace(adapter, kind="lora")
        backbone = add_adapter(backbone, adapter)
        lm_head: Any = backbone.get_output_embeddings()
        embedding: Any = backbone.get_input_embeddings()
        if lm_head is not None and lm_head.weight is not embedding.weight:
            lm_head.requires_grad_(False)  # it is never read: several ranks would wait for its gradient in vain
        encoder = LocalEncoder(
            backbone, tokenizer, run.encoder, open_prompts(run.encoder.prompts), source=run.model.path
        )
        return Built(StateModel(encoder), encoder, str(backbone.dtype))

    def objective(self, run: TrainRun, task: Task, built: Built) -> tuple[Objective, dict[str, str]]:
        """Chains where the data set has them, else one row a query and relevant document."""
        import hashlib

        from ..data_prep.task import Task
        from ..train.objectives.state import StateObjective

        paths = list(run.data.mix) or [run.data.path]
        tasks = [task if path == run.data.path else Task.open(path) for path in paths]
        parts = [_rows(run, one, name) for one, name in zip(tasks, paths, strict=True)]
        digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
        if run.data.mix and len(set(run.data.mix.values())) > 1:
            raise ValueError("data.mix: rows of a state encoder are taken as often as they are; give every folder 1")
        return StateObjective(parts, built.renderer, run.contrast, seed=run.loop.seed), {"rows": digest}

    def evaluation(self, run: TrainRun, task: Task, built: Built, suite: Suite) -> Evaluate:
        """The real search and readout over the whole corpus, encoded anew."""
        from ..eval.suites import evaluate_suite
        from ..models.recursive.retriever import RecursiveRetriever

        def evaluate(model: nn.Module, step: int) -> Mapping[str, float]:
            retriever = RecursiveRetriever.of(built.renderer, run.recurse)
            retriever.build_index(task.corpus, dtype=run.recurse.index_dtype, progress=True)
            return dict(evaluate_suite(retriever, task, suite, name=f"step {step}").values)

        return evaluate

    def facts(self, run: TrainRun, built: Built) -> Mapping[str, object]:
        """Settings of the rows, and the contract of the encoder before training."""
        from ..models.exports import flat

        facts = {f"contrast.{key}": value for key, value in asdict(run.contrast).items()}
        return facts | {f"contract.{key}": value for key, value in flat(built.renderer.contract).items()}

    def export(self, run: TrainRun, task: Task, built: Built, to: str, facts: Mapping[str, Any]) -> Path:
        """A sentence-transformers folder that gives the vectors of the model for a few real states and documents."""
        from ..train.export_state import StateFacts, export_state

        encoder = cast("LocalEncoder", built.renderer)
        about = StateFacts(recurse=run.recurse, **facts)
        return export_state(encoder, to, about, *_probes(task, run))


def _rows(run: TrainRun, task: Task, path: str) -> StateRows:
    from ..data_prep.state_rows import chain_rows, pair_rows

    queries = task.queries(run.data.split)
    chains = task.chains(run.data.split)
    wrong = _wrong(run, task, queries)
    if chains:
        return chain_rows(task.corpus, queries, chains, source=path, wrong=wrong)
    qrels = task.qrels(run.data.split)
    return pair_rows(task.corpus, queries, qrels, instruction_key="single-hop", source=path, wrong=wrong)


def _wrong(run: TrainRun, task: Task, queries: Sequence[Query]) -> WrongDocuments:
    """What retrievers and the model's own searches found for the training queries."""
    from ..data_prep.state_rows import WrongDocuments
    from ..models.bm25 import BM25
    from .rows import read_rankings

    first, last = run.contrast.rival_ranks
    rankings: list[Mapping[str, Sequence[str]]] = []
    for name in run.contrast.rivals:
        if name == "bm25":
            found = BM25.from_corpus(task.corpus).search([query.text for query in queries], k=last)
            rankings.append({query.id: hits.ids for query, hits in zip(queries, found, strict=True)})
        else:
            rankings.append({query: hits.ids for query, hits in read_rankings(name, "contrast.rivals").items()})
    picks: dict[str, Sequence[str]] = {}
    for name in run.contrast.picks:
        picks |= {query: hits.ids for query, hits in read_rankings(name, "contrast.picks").items()}
    known = [{q: [i for i in ids if i in task.corpus] for q, ids in of.items()} for of in (*rankings, picks)]
    return WrongDocuments(rankings=known[:-1], picks=known[-1], ranks=(first, last))


def _probes(task: Task, run: TrainRun) -> tuple[list[State], list[str]]:
    """States and documents whose vectors the folder remembers."""
    from ..models.protocols import State
    from ..models.recursive.prompts import open_prompts
    from ..models.recursive.retriever import document_text

    leaves = task.corpus.leaves()[:_PROBES].tolist()
    texts = [document_text(task.corpus, row) for row in leaves]
    role = open_prompts(run.encoder.prompts).primary_role
    queries = [query.text for query in task.queries(run.data.split)[:_PROBES]]
    states = [State(query, tuple(texts[:n]), role if n else "root") for n, query in enumerate(queries)]
    return states, texts
