"""A small multi-hop task, a tiny state encoder over it, and its objective."""

from __future__ import annotations

from pathlib import Path

import torch

from retrail.data_prep.chains import Chain
from retrail.data_prep.corpus import Corpus, Node
from retrail.data_prep.state_rows import StateRows, chain_rows, pair_rows
from retrail.data_prep.task import Query, Task, write_task
from retrail.models.backbone import add_adapter, load_backbone
from retrail.models.config import AdapterConfig, ModelConfig
from retrail.models.recursive.encoder import EncoderConfig, LocalEncoder
from retrail.models.recursive.prompts import preset
from retrail.models.recursive.state_model import StateModel
from retrail.train.config import StateObjectiveConfig
from retrail.train.objectives.state import StateObjective

NAMES = "Ada Bo Cy Di Ed Flo Gus Hal Ivy Jo Kim Lou Max Ned Ola Pia".split()
TOWNS = "Aachen Bergen Cork Dover Essen Falun Graz Horsens".split()


def toy_documents() -> Corpus:
    """People who were born in towns, and towns that lie on rivers; one text stands twice."""
    nodes = [Node(f"p{n}", None, name, f"{name} was born in {TOWNS[n % 8]}.") for n, name in enumerate(NAMES)]
    nodes += [Node(f"t{n}", None, town, f"{town} lies on river {n}, by a hill!") for n, town in enumerate(TOWNS)]
    return Corpus.from_nodes([*nodes, Node("copy", None, NAMES[0], f"{NAMES[0]} was born in {TOWNS[0]}.")])


def toy_chains(count: int = 16) -> tuple[list[Query], dict[str, Chain]]:
    """Which river does the birth town of someone lie on? Two hops; some with distractors."""
    queries = [Query(f"q{n}", f"Which river is where {NAMES[n]} was born on?") for n in range(count)]
    chains = {
        f"q{n}": Chain((f"p{n}", f"t{n % 8}"), True, tuple(f"p{(n + k) % 16}" for k in range(1, 1 + n % 4)))
        for n in range(count)
    }
    return queries, chains


def toy_rows(count: int = 16) -> StateRows:
    return chain_rows(toy_documents(), *toy_chains(count), source="toy")


def toy_pairs() -> StateRows:
    """One-hop rows of another data set, of which two ask the same."""
    corpus = toy_documents()
    queries = [Query(f"s{n}", f"What lies in {town}?") for n, town in enumerate(TOWNS)]
    qrels = {f"s{n}": {f"t{n}": 1} for n in range(8)}
    groups = {q.id: q.id for q in queries} | {"s0": "same", "s1": "same"}
    return pair_rows(corpus, queries, qrels, instruction_key="single-hop", source="pairs", groups=groups)


def tiny_encoder(adapter: AdapterConfig | None = None, path: str = "tiny:qwen3", **encoder: object) -> LocalEncoder:
    """The tiny encoder, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone, tokenizer = load_backbone(ModelConfig(path=path, dtype="float32"), torch.device("cpu"))
        if adapter is not None:
            backbone = add_adapter(backbone, adapter)
    settings = {"max_state_tokens": 1024, "max_document_tokens": 64, **encoder}
    return LocalEncoder(backbone, tokenizer, EncoderConfig(**settings), preset("multi-hop"))  # type: ignore[arg-type]


def toy_state(
    parts: list[StateRows] | None = None, *, full: bool = False, kept: int | None = None, **contrast: object
) -> tuple[StateModel, StateObjective]:
    """(model, objective), the adapter (or all weights) moved from where it starts at nothing."""
    encoder = tiny_encoder(None if full else AdapterConfig(rank=4), dimensions=kept)
    model = StateModel(encoder)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    config = StateObjectiveConfig(**{"rivals": [], **contrast})  # type: ignore[arg-type]
    return model, StateObjective(parts or [toy_rows()], encoder, config, seed=2)


def toy_multihop_task(folder: Path) -> Task:
    """A prepared folder with chains, train and dev."""
    queries, chains = toy_chains()
    qrels = {q.id: dict.fromkeys(chains[q.id].gold, 1) for q in queries}
    splits = {"train": (queries[:12], qrels), "dev": (queries[12:], qrels)}
    splits = {name: (asked, {q.id: qrels[q.id] for q in asked}) for name, (asked, _) in splits.items()}
    of = {name: {q.id: chains[q.id] for q in asked} for name, (asked, _) in splits.items()}
    return write_task(folder, name="musique", corpus=toy_documents(), splits=splits, source={}, chains=of)
