"""`retrail answers`: the same language model answers from what each retriever found, and a judge counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import run_command
from .config import AnswersRun

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus
    from ..data_prep.task import Query, Task
    from ..eval.answers import AnswerResult
    from ..models.protocols import LanguageModel, Retriever


def run(run: AnswersRun) -> int:
    """Search, answer, judge, print the table, and write it beside the answers.

    Raises:
        ValueError: no query of the split has a reference answer.
    """
    from ..data_prep.task import Task
    from ..eval.answers import answers_compared, answers_table
    from ..eval.suites import sample_queries
    from ..models.decision.navigate import Navigator
    from ..models.lm import open_language_model
    from ..train.files import write_text
    from .systems import controls, open_retriever

    task = Task.open(run.data.path)
    references = task.answers(run.split)
    queries = sample_queries([q for q in task.queries(run.split) if q.id in references], run.limit)
    if not queries:
        raise ValueError(f"split={run.split} of {task.name} has no reference answers{_where_they_are(task)}")
    lm = open_language_model(run.lm, device=run.device, cache=run.cache)
    judge = open_language_model(run.judge, device=run.device, cache=run.cache) if run.judge else lm
    retriever, about = open_retriever(run.retriever, task.corpus, run.navigate, run.device)
    navigator = retriever if isinstance(retriever, Navigator) else None
    others = [name for name in run.baselines if name != run.retriever]
    systems: list[tuple[str, Retriever]] = [(run.retriever if navigator is None else "navigation", retriever)]
    systems += [(name, other) for name, other, _ in controls(others, task.corpus, navigator, run.retriever, about)]
    out = Path(run.out) if run.out else _default_out(run.retriever)
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for name, system in systems:
        result = _one_system(run, name, system, task.corpus, queries, references, (lm, judge))
        write_text(out / f"{_folder(name)}.jsonl", _rows(result, queries, references))
        results.append(result)
    table, lines = answers_table(results), answers_compared(results)
    print(f"{task.name}, split {run.split}; answers: {lm.description}; judge: {judge.description}\n\n{table}")
    print("\n".join(lines))
    write_text(out / "table.md", table + "\n" + "".join(f"- {line}\n" for line in lines))
    print(f"answers and table: {out}")
    return 0


def _one_system(
    run: AnswersRun,
    name: str,
    retriever: Retriever,
    corpus: Corpus,
    queries: Sequence[Query],
    references: Mapping[str, str],
    models: tuple[LanguageModel, LanguageModel],
) -> AnswerResult:
    """`models`: who answers, and who judges."""
    from ..eval.answers import AnswerResult, answer_queries, judge_answers

    ranked = retriever.search([query.text for query in queries], k=run.top)
    hits = {query.id: found for query, found in zip(queries, ranked, strict=True)}
    answers = answer_queries(models[0], corpus, queries, hits, top=run.top, max_tokens=run.max_tokens)
    p_correct = judge_answers(
        models[1],
        [query.text for query in queries],
        [references[query.id] for query in queries],
        [answer.text for answer in answers],
        min_label_mass=run.min_label_mass,
    )
    by_query = {query.id: float(p) for query, p in zip(queries, p_correct, strict=True)}
    return AnswerResult(name, tuple(answers), by_query)


def _rows(result: AnswerResult, queries: Sequence[Query], references: Mapping[str, str]) -> str:
    rows = [
        {
            "id": query.id,
            "question": query.text,
            "reference": references[query.id],
            "answer": answer.text,
            "p_correct": result.p_correct[query.id],
            "passages": answer.passages,
            "truncated": answer.truncated,
        }
        for query, answer in zip(queries, result.answers, strict=True)
    ]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _where_they_are(task: Task) -> str:
    splits = [split for split in task.splits if task.answers(split)]
    return f"; those that have are: {', '.join(splits)}" if splits else ", and no other split has any"


def _default_out(retriever: str) -> Path:
    return (Path(retriever) if Path(retriever).is_dir() else Path("runs") / _folder(retriever)) / "answers"


def _folder(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.lower())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(AnswersRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
