"""One sentence a group of pages, written by any language model from the titles inside; killed runs go on."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..data_prep.corpus import Corpus
from ..data_prep.formats.jsonio import read_jsonl, require
from ..data_prep.sentences import first_sentence
from ..data_prep.tree import Tree
from ..data_prep.tree_update import group_rows
from .prompts import SUMMARY_PROMPT_VERSION, summary_prompt
from .protocols import LanguageModel

MAX_TITLE_CHARACTERS = 120
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]+")
_LIST_MARK = re.compile(r"(?:[-*\u2022]|\d+[.)])(?:\s+|$)")


@dataclass(frozen=True, slots=True)
class Summaries:
    """The tree with summaries as its groups' texts, and the groups that the model gave no sentence for."""

    tree: Tree
    failed: tuple[str, ...]


class _Cache:
    """Sentences by key in a JSONL file: a line is on disk before the next group is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sentences: dict[str, str] = {}
        if path.exists():
            _drop_cut_line(path)
            for number, row in read_jsonl(path):
                where = f"{path}:{number}"
                self._sentences[require(row, "key", str, where)] = require(row, "summary", str, where)

    def get(self, key: str) -> str | None:
        return self._sentences.get(key)

    def put(self, found: dict[str, str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8", newline="\n") as handle:
            for key, summary in found.items():
                handle.write(json.dumps({"key": key, "summary": summary}, ensure_ascii=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        self._sentences |= found


def _drop_cut_line(path: Path) -> None:
    """A killed run may leave a line without its end: that group is asked for again."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as handle:
            handle.truncate(content.rfind(b"\n") + 1)


def summarise_groups(
    tree: Tree,
    lm: LanguageModel,
    cache_path: str | Path,
    *,
    only: Collection[str] | None = None,
    max_titles: int = 50,
    batch_size: int = 32,
) -> Summaries:
    """Each group's text becomes one sentence about its children's titles, from the deepest level up.

    cache_path: a JSONL file; what stands in it for the same prompt, model and titles is not asked for again.
    only: ids of the groups to write (None: all); upper groups read the summaries below them.
    max_titles: evenly spaced children that the model is shown; more cost tokens and say more.
    A group without a usable reply keeps its text and is named in `failed`.

    Raises:
        ValueError: max_titles or batch_size below 1, or a damaged cache (names file and line).
    """
    if max_titles < 1 or batch_size < 1:
        raise ValueError(f"max_titles={max_titles} and batch_size={batch_size} must be 1 or more")
    corpus, cache = tree.corpus, _Cache(Path(cache_path))
    groups = group_rows(tree)
    written: dict[int, str] = {}
    failed: list[str] = []
    for level in reversed(range(corpus.num_levels)):
        wanted = [r for r in corpus.level_rows(level) if r in groups and (only is None or corpus.id(r) in only)]
        for start in range(0, len(wanted), batch_size):
            rows = wanted[start : start + batch_size]
            titles = [_titles(corpus, row, written, groups, max_titles) for row in rows]
            for row, sentence in zip(rows, _ask(lm, titles, cache), strict=True):
                if sentence:
                    written[row] = sentence
                else:
                    failed.append(corpus.id(row))
    nodes = (replace(node, text=written.get(row, node.text)) for row, node in enumerate(corpus))
    return Summaries(replace(tree, corpus=Corpus.from_nodes(nodes)), tuple(failed))


def _ask(lm: LanguageModel, titles: Sequence[tuple[str, ...]], cache: _Cache) -> Iterator[str]:
    keys = [_key(lm.description, group) for group in titles]
    missing = {key: group for key, group in zip(keys, titles, strict=True) if cache.get(key) is None}
    if missing:
        replies = lm.generate([summary_prompt(group) for group in missing.values()], max_tokens=80)
        found = {key: one_sentence(reply.text) for key, reply in zip(missing, replies, strict=True)}
        cache.put({key: sentence for key, sentence in found.items() if sentence})
    return (cache.get(key) or "" for key in keys)


def one_sentence(reply: str) -> str:
    """The first sentence of a reply on one line, without control characters or the mark of a list before it.

    It is "" where there are no letters or digits in it.
    """
    flat = " ".join(_CONTROL.sub(" ", reply).split())
    mark = _LIST_MARK.match(flat)
    sentence = first_sentence(flat[mark.end() :] if mark else flat)
    return sentence if any(character.isalnum() for character in sentence) else ""


def _titles(corpus: Corpus, row: int, written: dict[int, str], groups: Collection[int], limit: int) -> tuple[str, ...]:
    children = corpus.children(row)
    chosen = [children[i * len(children) // limit] for i in range(limit)] if len(children) > limit else list(children)
    texts = (written.get(r) or (corpus.text(r) if r in groups else corpus.title(r)) or corpus.text(r) for r in chosen)
    return tuple(" ".join(_CONTROL.sub(" ", text).split())[:MAX_TITLE_CHARACTERS] for text in texts)


def _key(description: str, titles: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps([SUMMARY_PROMPT_VERSION, description, titles]).encode()).hexdigest()
