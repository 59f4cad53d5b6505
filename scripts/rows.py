"""What `retrail train` learns from: the rows of each data set, with rivals from retrievers, runs and walks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .config import TrainRun

if TYPE_CHECKING:
    from ..data_prep.hits import Hits
    from ..data_prep.task import Query, Task
    from ..models.decision.layout import SlateLayout
    from ..models.decision.model import DecisionModel
    from ..train.objectives.base import Objective
    from ..train.objectives.decision_rivals import RivalSource

_RETRIEVERS = ("bm25", "dense")


def build_objective(
    run: TrainRun, task: Task, layout: SlateLayout, model: DecisionModel | None = None
) -> tuple[Objective, dict[str, str]]:
    """The objective over `task`, or over the mixture that the settings name, and what identifies its rows.

    model: what is trained, whose base model teaches with objective.teacher=likelihood; without it the slates are the
        same, and their labels mean nothing.

    Raises:
        FileNotFoundError: a data set or a file of rivals is not there.
        ValueError: a file that is damaged or of no data set that is trained on; names it.
    """
    from ..data_prep.task import Task
    from ..models.decision.likelihood import QueryLikelihood
    from ..train.objectives.decision import DecisionObjective
    from ..train.objectives.decision_rivals import Rivals, gold_path_rows, rows_digest
    from ..train.objectives.distil import DistilObjective, anchors
    from ..train.objectives.mixed import MixedObjective

    config, split, mix = run.objective, run.data.split, run.data.mix
    tasks = {path: task if path == run.data.path else Task.open(path) for path in mix} or {"": task}
    queries = {path: part.queries(split) for path, part in tasks.items()}
    walked = _walked(config.walks, tasks, queries)
    sources = _sources(run, tasks, queries)
    labelled = config.teacher == "labels"
    teacher = None if labelled or model is None else QueryLikelihood(model.backbone, layout)
    parts: list[DecisionObjective] = []
    digests = []
    for path, part in tasks.items():
        rows = gold_path_rows(
            part.corpus,
            queries[path],
            part.qrels(split) if labelled else anchors(part.corpus, queries[path]),
            trained_level=config.trained_level,
            rivals=Rivals(sources[path], (config.rival_ranks[0], config.rival_ranks[1]), walked[path]),
        )
        of = rows, part.corpus, layout, config
        if teacher is None:
            parts.append(DecisionObjective(*of, seed=run.loop.seed, name=path))
        else:
            parts.append(DistilObjective(*of, teacher, seed=run.loop.seed, name=path))
        digests.append(rows_digest(rows))
    facts = {f"data.mix.{path}": f"{weight} of {tasks[path].fingerprint}" for path, weight in mix.items()}
    facts["rows"] = hashlib.sha256("".join(digests).encode()).hexdigest()
    if not mix:
        return parts[0], facts
    return MixedObjective(parts, list(mix.values()), seed=run.loop.seed), facts


def _sources(
    run: TrainRun, tasks: Mapping[str, Task], queries: Mapping[str, Sequence[Query]]
) -> dict[str, list[RivalSource]]:
    """For each data set what ranks its rivals; a file of rankings serves those whose queries and nodes it holds."""
    from ..train.objectives.decision_rivals import BM25_RIVALS, from_run

    sources: dict[str, list[RivalSource]] = {path: [] for path in tasks}
    for name in run.objective.rivals:
        if name in _RETRIEVERS:
            source = BM25_RIVALS if name == "bm25" else _dense(run.runtime.device)
            for of in sources.values():
                of.append(source)
            continue
        rankings = read_rankings(name)
        for path in _served(rankings, tasks, queries, name):
            sources[path].append(from_run(rankings))
    return sources


def _dense(device: str) -> RivalSource:
    from ..eval.dense import DenseRetriever
    from ..train.objectives.decision_rivals import searched

    place = None if device == "auto" else device
    return searched(lambda corpus, rows: DenseRetriever.from_corpus(corpus, rows, device=place))


def read_rankings(name: str, key: str = "objective.rivals") -> dict[str, Hits]:
    """The rankings of a file, `run.trec` or `hits.jsonl`; an error names the setting `key`."""
    from ..data_prep.formats.trec import read_run
    from ..eval.run import read_hits

    try:
        return read_hits(name) if name.endswith(".jsonl") else read_run(name, order="score")
    except FileNotFoundError as error:
        known = ", ".join(_RETRIEVERS)
        raise FileNotFoundError(f"{key}: {name} is none of {known}, and no file of that name") from error


def _served(
    rankings: Mapping[str, Hits], tasks: Mapping[str, Task], queries: Mapping[str, Sequence[Query]], name: str
) -> list[str]:
    """The data sets whose queries these rankings answer, with nodes that are all there.

    Raises:
        ValueError: there is none.
    """
    served, unknown = [], []
    for path, task in tasks.items():
        ranked = {node for query in queries[path] if query.id in rankings for node in rankings[query.id].ids}
        missing = sorted(node for node in ranked if node not in task.corpus)
        unknown += missing
        if ranked and not missing:
            served.append(path)
    if not served and unknown:
        raise ValueError(
            f"objective.rivals: {name} ranks {len(unknown)} nodes that the corpus lacks, first {unknown[0]!r}; search "
            "the prepared folder that is trained on"
        )
    if not served:
        raise ValueError(f"objective.rivals: {name} has no ranking of any training query; search their split")
    return served


def _walked(
    files: Sequence[str], tasks: Mapping[str, Task], queries: Mapping[str, Sequence[Query]]
) -> dict[str, dict[int, dict[str, list[str]]]]:
    """For each data set, by level and query, what the searches of all files judged; files take turns."""
    from ..data_prep.negatives import interleave
    from ..data_prep.walks import judged_nodes, read_header, read_walks

    judged: dict[str, dict[int, dict[str, list[Sequence[str]]]]] = {path: {} for path in tasks}
    for file in files:
        corpus = read_header(file)["corpus_fingerprint"]
        # Where none fits, the reader of the file refuses the first and says why.
        of = [path for path, part in tasks.items() if part.corpus.fingerprint == corpus] or list(tasks)[:1]
        for path in of:
            _, walks = read_walks(file, tasks[path].corpus)
            for level, by_query in judged_nodes(walks, queries[path], f"objective.walks: {file}").items():
                for query_id, ids in by_query.items():
                    judged[path].setdefault(level, {}).setdefault(query_id, []).append(ids)
    return {
        path: {level: {q: interleave(ids) for q, ids in by_query.items()} for level, by_query in levels.items()}
        for path, levels in judged.items()
    }
