"""A disk cache in front of a language model: a run that was killed goes on without paying twice.

What is asked for is the model's description, the kind of question, its parameters and the prompt (`answer_cache.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..data_prep.hits import Cost
from .answer_cache import AnswerCache
from .protocols import Completion, LanguageModel, Prompt

_BATCH = 32


class CachedLanguageModel:
    """Answers from the file where it can, from the model otherwise; what came from the file costs nothing."""

    def __init__(self, model: LanguageModel, path: str | Path) -> None:
        """Open or make the file.

        Raises:
            ValueError: the file is there and is no cache of answers.
        """
        self._model, self._cache = model, AnswerCache(path)

    @property
    def description(self) -> str:
        """That of the model."""
        return self._model.description

    def generate(
        self, prompts: Sequence[Prompt], *, max_tokens: int, schema: Mapping[str, object] | None = None
    ) -> list[Completion]:
        """As `LanguageModel.generate`; each batch of answers is on disk before the next is asked for."""

        def ask(part: Sequence[Prompt]) -> list[tuple[str, Cost]]:
            answers = self._model.generate(part, max_tokens=max_tokens, schema=schema)
            return [(json.dumps([answer.text, answer.truncated]), answer.cost) for answer in answers]

        out = []
        for value, cost in self._through("generate", {"max_tokens": max_tokens, "schema": schema}, prompts, ask):
            text, truncated = json.loads(value)
            out.append(Completion(text, cost, truncated))
        return out

    def label_logprobs(self, prompts: Sequence[Prompt], labels: Sequence[str]) -> np.ndarray:
        """As `LanguageModel.label_logprobs`."""

        def ask(part: Sequence[Prompt]) -> list[tuple[str, Cost]]:
            return [(json.dumps(row), Cost()) for row in self._model.label_logprobs(part, labels).tolist()]

        rows = [json.loads(value) for value, _ in self._through("labels", {"labels": list(labels)}, prompts, ask)]
        return np.array(rows, dtype=float).reshape(len(prompts), len(labels))

    def _through(
        self,
        kind: str,
        parameters: Mapping[str, object],
        prompts: Sequence[Prompt],
        ask: Callable[[Sequence[Prompt]], list[tuple[str, Cost]]],
    ) -> Iterator[tuple[str, Cost]]:
        """(answer, what it cost just now) of each prompt; one that stands there twice is asked and paid once."""
        keys = [self._key(kind, parameters, prompt) for prompt in prompts]
        known = {key: value for key in set(keys) if (value := self._cache.get(key)) is not None}
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in known}
        paid: dict[str, Cost] = {}
        for start in range(0, len(missing), _BATCH):
            part = list(missing)[start : start + _BATCH]
            for key, (value, cost) in zip(part, ask([missing[key] for key in part]), strict=True):
                known[key], paid[key] = value, cost
                self._cache.put(key, value)
        return ((known[key], paid.pop(key, Cost())) for key in keys)

    def _key(self, kind: str, parameters: Mapping[str, object], prompt: Prompt) -> str:
        parts = json.dumps([parameters, asdict(prompt)], sort_keys=True)
        return AnswerCache.key(self._model.description, kind, parts)
