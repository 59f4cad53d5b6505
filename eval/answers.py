"""Answers from the best passages, and how many of them a judge calls correct (the MTRAG table of DecisionRAG).

One language model answers from what each retriever found, so that a difference comes of the passages alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..data_prep.corpus import Corpus
from ..data_prep.hits import Cost, Hits
from ..data_prep.task import Query
from ..models.decision.scorer import LowLabelMass
from ..models.prompts import ANSWER_PROMPT, JUDGE_PROMPT
from ..models.protocols import LanguageModel, Prompt
from .significance import paired
from .trace_view import visible


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered to a query from the passages with these ids. `truncated`: the limit of tokens ended it."""

    query_id: str
    text: str
    passages: tuple[str, ...]
    cost: Cost = Cost()
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class AnswerResult:
    """The answers from what one retriever found: P(correct) by query id; above one half counts as correct."""

    name: str
    answers: tuple[Answer, ...]
    p_correct: Mapping[str, float]

    @property
    def correct(self) -> dict[str, float]:
        """1.0 or 0.0 by query id."""
        return {query_id: float(p > 0.5) for query_id, p in self.p_correct.items()}

    @property
    def share(self) -> float:
        """The share of answers that are judged correct."""
        return sum(self.correct.values()) / len(self.p_correct)


def answer_queries(
    lm: LanguageModel,
    corpus: Corpus,
    queries: Sequence[Query],
    hits: Mapping[str, Hits],
    *,
    top: int = 5,
    max_tokens: int = 256,
) -> list[Answer]:
    """One answer a query, from the first `top` passages of its ranking (all there are, where it is shorter).

    top: more passages hold the answer more often, cost tokens and distract.
    max_tokens: of an answer.

    Raises:
        ValueError: `top` below 1, or a query without a ranking (an empty one is allowed).
    """
    if top < 1:
        raise ValueError(f"top={top} must be 1 or more")
    if missing := [query.id for query in queries if query.id not in hits]:
        raise ValueError(
            f"{len(missing)} queries have no ranking to answer from, first {missing[0]!r}; search for them"
        )
    passages = [hits[query.id].ids[:top] for query in queries]
    prompts = [answer_prompt(corpus, query.text, ids) for query, ids in zip(queries, passages, strict=True)]
    completions = lm.generate(prompts, max_tokens=max_tokens)
    return [
        # A server's JSON can hold half a character, which no file takes.
        Answer(
            query.id,
            completion.text.encode(errors="replace").decode().strip(),
            ids,
            completion.cost,
            completion.truncated,
        )
        for query, ids, completion in zip(queries, passages, completions, strict=True)
    ]


def answer_prompt(corpus: Corpus, question: str, ids: Sequence[str]) -> Prompt:
    """The question with its passages, best first; all of it is the user's words, and so data."""
    shown = []
    for n, node in enumerate(ids, start=1):
        row = corpus.row(node)
        title, text = corpus.title(row), corpus.text(row).strip()
        shown.append(ANSWER_PROMPT.passage.format(n=n, passage="\n".join(filter(None, (title, text)))))
    words = "".join(shown) or ANSWER_PROMPT.no_passages
    return Prompt(ANSWER_PROMPT.system, words + ANSWER_PROMPT.question.format(question=question))


def judge_answers(
    lm: LanguageModel,
    questions: Sequence[str],
    references: Sequence[str],
    answers: Sequence[str],
    *,
    min_label_mass: float = 0.05,
) -> np.ndarray:
    """P(correct) of each answer: P(yes) over P(yes) + P(no), every way to write them added up; shape (answers,).

    An empty answer is wrong without being asked about. No text is parsed.

    Raises:
        LowLabelMass: less than `min_label_mass` of the probability falls on yes and no for some answer.
        ValueError: lists of different lengths, or a reference that is empty.
    """
    if not len(questions) == len(references) == len(answers):
        raise ValueError(f"{len(questions)} questions, {len(references)} references and {len(answers)} answers")
    if empty := [n for n, reference in enumerate(references) if not reference.strip()]:
        raise ValueError(f"reference number {empty[0]} is empty, so that nothing can be judged by it; leave it out")
    asked = [n for n, answer in enumerate(answers) if answer.strip()]
    p_correct = np.zeros(len(answers))
    if not asked:
        return p_correct
    prompts = [
        Prompt(
            JUDGE_PROMPT.system,
            JUDGE_PROMPT.question.format(question=questions[n], reference=references[n], answer=answers[n]),
        )
        for n in asked
    ]
    p_AL = np.exp(lm.label_logprobs(prompts, [*JUDGE_PROMPT.yes, *JUDGE_PROMPT.no]))
    yes_A, no_A = (part.sum(1) for part in np.split(p_AL, [len(JUDGE_PROMPT.yes)], axis=1))
    _check_mass(yes_A + no_A, min_label_mass)
    p_correct[asked] = yes_A / (yes_A + no_A)
    return p_correct


def _check_mass(mass_A: np.ndarray, floor: float) -> None:
    low = ~(mass_A >= max(floor, np.finfo(float).tiny))  # not a number is low too
    if low.any():
        raise LowLabelMass(
            f"for {int(low.sum())} of {len(mass_A)} answers the judge gives yes and no together too little "
            f"probability, down to {float(mass_A.min()):.2g} (min_label_mass={floor}): it would rather say something "
            "else, so that its verdicts mean nothing. Take a judge that follows instructions, with thinking off"
        )


def answers_table(results: Sequence[AnswerResult]) -> str:
    """A Markdown table: judged correct (share and count), mean P(correct), tokens an answer.

    Raises:
        ValueError: no results, or one without answers.
    """
    if not results or not all(result.answers for result in results):
        raise ValueError("no answers to put into a table")
    lines = [
        "| passages from | judged correct | of | mean P(correct) | cut off | tokens/answer |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        tokens = sum(a.cost.prompt_tokens + a.cost.generated_tokens for a in result.answers) / len(result.answers)
        count = int(sum(result.correct.values()))
        cells = [
            visible(result.name).replace("|", "\\|"),
            f"{100 * result.share:.1f} % ({count})",
            str(len(result.p_correct)),
            f"{np.mean(list(result.p_correct.values())):.3f}",
            str(sum(a.truncated for a in result.answers)),
            f"{tokens:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def answers_compared(results: Sequence[AnswerResult]) -> list[str]:
    """The first retriever against each other one on the same queries, a line each (`significance.paired`)."""
    first, *others = results
    return [
        f"judged correct, {visible(first.name)} less {visible(other.name)}: {paired(first.correct, other.correct)}"
        for other in others
        if first.correct.keys() == other.correct.keys()
    ]
