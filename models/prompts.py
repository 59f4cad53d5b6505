"""Every template of the toolkit, versioned; training and inference render from here and nowhere else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionPrompt:
    """The words around a slate. `{n}` is a candidate's number in its slate, from 1.

    The trunk reads: system, query, candidates (a group's heading before its first), the query again; with the
    candidates first, queries follow in the branches. Texts come with the space before them, as in running text: most
    tokenizers write a word and its space as one token.
    `cue` ends each candidate and the repeated query for a pointer head: it makes the model sum the text up in the
    state of one token (PromptEOL, arXiv 2307.16645).
    `answer` is what a yes/no branch says before its label; `choice_*` are the multiple-choice counterparts.
    """

    version: int
    system: str
    query: str
    candidates: str
    group: str
    tag: str
    repeat_query: bool
    cue: str
    question: str
    answer: str
    yes: str
    no: str
    choice_question: str
    choice_answer: str
    choice_label: str


_NAVIGATE = DecisionPrompt(
    version=2,
    system=(
        "You help to find passages that answer a query. You read the query and a numbered list of candidates "
        "(sections or passages) and say which ones to open."
    ),
    query="Query:",
    candidates="\n\nCandidates:\n",
    group="#",
    tag="[{n}]",
    repeat_query=True,
    cue=' This means in one word: "',
    question=(
        "\nFor each candidate: is it worth opening to find what the query asks for? "
        "Write the candidate, a colon, and yes or no."
    ),
    answer=":",
    yes=" yes",
    no=" no",
    choice_question="\nWhich one candidate answers the query best? Write its number in brackets.",
    choice_answer="[",
    choice_label="{n}]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonePrompt:
    """What a multiple-choice question in words adds where it may be that no candidate is right.

    It is separate from `DecisionPrompt`, because a pointer head, which asks nothing in words, never shows it.
    `question` follows `choice_question`; `label` is written like a `choice_label`, with a number that no candidate has.
    """

    version: int
    question: str
    label: str


NONE_PROMPT = NonePrompt(version=1, question=" If none of them answers it, write [0].", label="0]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelihoodPrompt:
    """The chat in which a passage makes a query likely: the user shows the passage, the answer is the query.

    Without a passage the user says `passage` alone, which asks how likely the query is anyway.
    """

    version: int
    system: str
    passage: str


LIKELIHOOD_PROMPT = LikelihoodPrompt(
    version=1,
    system=(
        "You read a passage of a collection and write what a user would ask to find it. "
        "Write the user's question and nothing else."
    ),
    passage="Passage:",
)

# `plain` leaves the cue out: a model that is trained to match tokens reads a quarter less without it.
DECISION_PROMPTS = {"navigate": _NAVIGATE, "plain": replace(_NAVIGATE, cue="")}


def decision_prompt(name: str) -> DecisionPrompt:
    """The decision prompt of that name; ValueError lists the names there are."""
    if name not in DECISION_PROMPTS:
        raise ValueError(f"decision.instruction={name!r} is unknown; there are: {', '.join(sorted(DECISION_PROMPTS))}")
    return DECISION_PROMPTS[name]


def prompt_hash(prompt: DecisionPrompt | NonePrompt | LikelihoodPrompt) -> str:
    """sha256 over every word of the prompt: what an exported folder stores and `load` compares."""
    return hashlib.sha256(json.dumps(asdict(prompt), sort_keys=True).encode()).hexdigest()
