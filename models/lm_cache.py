"""A disk cache in front of a language model: a run that was killed goes on without paying twice.

One sqlite file, which several processes may share. The key is a sha256 over the model's description, the kind of
question, its parameters and the prompt; the text of a prompt itself is not stored.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..data_prep.hits import Cost
from .protocols import Completion, LanguageModel, Prompt

_BATCH = 32
_BUSY_SECONDS = 60.0


class CachedLanguageModel:
    """Answers from the file where it can, from the model otherwise; what came from the file costs nothing."""

    def __init__(self, model: LanguageModel, path: str | Path) -> None:
        """Open or make the file.

        Raises:
            ValueError: the file is there and is no sqlite database.
        """
        self._model = model
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS)
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path}: not a cache of answers ({error}); choose another file or remove it") from error

    def _prepare(self) -> None:
        """Make the table. Of several processes that open a new file at once, one switches it to WAL; others wait."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                break
            except sqlite3.OperationalError:  # sqlite does not wait for this lock by itself
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._db.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        self._db.commit()

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
        known: dict[str, str] = {}
        for key in set(keys):
            row = self._db.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
            if row is not None:
                known[key] = row[0]
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in known}
        paid: dict[str, Cost] = {}
        for start in range(0, len(missing), _BATCH):
            part = list(missing)[start : start + _BATCH]
            for key, (value, cost) in zip(part, ask([missing[key] for key in part]), strict=True):
                known[key], paid[key] = value, cost
                self._db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, value))
            self._db.commit()
        return ((known[key], paid.pop(key, Cost())) for key in keys)

    def _key(self, kind: str, parameters: Mapping[str, object], prompt: Prompt) -> str:
        whole = [self._model.description, kind, parameters, asdict(prompt)]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode(errors="surrogatepass")).hexdigest()
