"""Settings of `retrail prep`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from ..models.config import (
    check_choice,
    check_positive,
)
from .config_base import Command, check_text

READER_OPTIONS = {
    "pydocs": (),
    "multidoc2dial": ("documents", "dialogues", "split_by", "segmentation", "words", "domain_level", "skip_missing"),
    "beir": ("splits", "skip_empty", "allow_dangling"),
    "conditionalqa": ("documents", "splits"),
    "markdown": ("queries", "qrels"),
    "html": ("queries", "qrels"),
    "tree": ("groups", "balanced", "branching", "encoder", "seed", "summaries"),
    "update": ("add", "remove", "summaries"),
    "mtrag": ("domain", "skip_missing"),
    "musique": ("splits", "files", "corpus", "documents"),
    "hotpotqa": ("splits", "files", "corpus", "documents"),
    "2wiki": ("splits", "files", "corpus", "documents"),
}


@dataclass(kw_only=True, slots=True)
class PrepData:
    """Which reader, and its options.

    name: the reader.
    documents: (multidoc2dial, conditionalqa) file of the documents in `path` (null: the one named
        `*doc2dial_doc*.json`, for conditionalqa `documents.json`; also gzipped). (musique, hotpotqa, 2wiki) the pool
        file, `[{title, text}]` (null: the one named `*corpus*.json`).
    dialogues: (multidoc2dial) files of the dialogues in `path` (null: all named `*doc2dial_dial_*.json`, also gzipped).
    split_by: (multidoc2dial) `files` takes each file of dialogues as the split in its name, `hash` divides dialogues
        by their ids into train (8 of 10 buckets) and dev (1 of 10), `auto` does the second if there is only one file.
    segmentation: (multidoc2dial) passages are sections (`structure`) or runs of `words` words (`token`).
    words: (multidoc2dial) words of a `token` passage; fewer makes passages more precise and the tree wider.
    domain_level: (multidoc2dial) whether domains are the root level, above the documents.
    skip_missing: (multidoc2dial) leave out turns that are grounded in a document that is not there, (mtrag) queries
        with a gold passage that is not there, instead of stopping.
    domain: (mtrag) which of its corpora: `clapnq`, `cloud`, `fiqa`, `govt`.
    splits: (beir) which files of `qrels/` to take (null: all); (conditionalqa) of train, dev, test (null: the first
        two; test has no evidences). (musique, hotpotqa, 2wiki) of train, dev, test (null: the first two, as far as
        they are there); those that are prepared together share one corpus, each alone has its own.
    files: (musique, hotpotqa, 2wiki) files of the questions in `path`, with the split in each name (null: those with
        the data set's own names, also gzipped).
    corpus: (musique, hotpotqa, 2wiki) `paragraphs` of all questions, the `pool` file alone, or `both`; more documents
        are harder to search. Gold paragraphs that a pool lacks count as not found.
    skip_empty: (beir) leave out documents without title and text, instead of stopping.
    allow_dangling: (beir) keep judgements of documents that the corpus lacks, instead of stopping; nobody can find
        them.
    queries: (markdown, html) file of queries in `path`, as BEIR's `queries.jsonl`; null: only a corpus is written.
    qrels: (markdown, html) file of their judgements in `path`, as in BEIR.
    groups: (tree) how many k-means groups to put above the pages; more makes each smaller and the first level wider.
    balanced: (tree) groups differ in size by at most one.
    branching: (tree) instead of groups, as many levels as it takes with so many children a node.
    summaries: (tree, update) a language model that writes one sentence about each group, or each that changed: a
        folder, a Hub id, `package:smollm2` or `server:MODEL@http://HOST:PORT/v1` (null: titles say what is inside).
        What it wrote is kept in a file beside `out`, so that nothing is asked twice.
    encoder: (tree) a sentence-transformers model for title and first sentence, as of the dense baseline.
    seed: (tree) of k-means.
    add: (update) JSON Lines file of pages to put in: `_id`, `title`, `text`, `parent` for what is below a page.
    remove: (update) ids of pages to take out, before any are put in.
    """

    name: str = "pydocs"
    documents: str | None = None
    dialogues: list[str] | None = None
    split_by: str = "auto"
    segmentation: str = "structure"
    words: int = 100
    domain_level: bool = True
    skip_missing: bool = False
    domain: str = "cloud"
    splits: list[str] | None = None
    files: list[str] | None = None
    corpus: str = "paragraphs"
    skip_empty: bool = False
    allow_dangling: bool = False
    queries: str | None = None
    qrels: str | None = None
    groups: int | None = None
    balanced: bool = False
    branching: int | None = None
    encoder: str = "package:minilm"
    summaries: str | None = None
    seed: int = 0
    add: str | None = None
    remove: list[str] | None = None

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, tuple(READER_OPTIONS))
        check_choice("data.split_by", self.split_by, ("auto", "files", "hash"))
        check_choice("data.segmentation", self.segmentation, ("structure", "token"))
        check_positive("data.words", self.words)
        check_choice("data.corpus", self.corpus, ("paragraphs", "pool", "both"))
        check_choice("data.domain", self.domain, ("clapnq", "cloud", "fiqa", "govt"))
        for option in fields(self)[1:]:
            if option.name not in READER_OPTIONS[self.name] and getattr(self, option.name) != option.default:
                raise ValueError(f"data.{option.name} has no meaning for data={self.name}; leave it out")
        self._check_tree()

        if self.documents is not None and self.corpus == "paragraphs" and "corpus" in READER_OPTIONS[self.name]:
            raise ValueError("data.documents names the pool file, which data.corpus=paragraphs does not read")

    def _check_tree(self) -> None:
        check_positive("data.groups", self.groups)
        if self.branching is not None and self.branching < 2:
            raise ValueError(f"data.branching={self.branching} must be 2 or more")
        if self.name == "tree" and (self.groups is None) == (self.branching is None):
            raise ValueError("data=tree needs either data.groups=N or data.branching=N")
        if self.balanced and self.branching is not None:
            raise ValueError("data.balanced belongs to data.groups; data.branching is always balanced")
        if self.name == "update" and not (self.add or self.remove):
            raise ValueError("data=update needs data.add=FILE.jsonl or data.remove=[ID, ...]")


@dataclass(kw_only=True, slots=True)
class PrepRun(Command):
    """Read a data set in its published format and write a prepared folder: corpus, queries, judgements.

    path: folder of the raw data, or the prepared folder that `tree` and `update` start from (not for `pydocs`, which
        is on every machine).
    out: the folder to write.
    overwrite: replace a prepared folder that is already there, once the new one is whole.
    """

    command: ClassVar[str] = "prep"

    data: PrepData = field(default_factory=PrepData)
    path: str | None = None
    out: str = "data/${data.name}"
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_text("out", self.out)
        if self.data.name == "pydocs" and self.path is not None:
            raise ValueError(f"path={self.path} has no meaning for data=pydocs; leave it out")
        if self.data.name != "pydocs" and not self.path:
            raise ValueError(f"data={self.data.name} also needs path=FOLDER, where its raw files lie")
