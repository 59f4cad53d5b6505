"""MuSiQue, HotpotQA and 2WikiMultihopQA as tasks: paragraphs, questions, and the chain of paragraphs each needs.

The corpus is flat. Equal paragraphs (title and text, white space at their ends aside) of several questions are one
document, whose id is made of its title and a hash of both: it is the same whatever else is prepared with it.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..chains import Chain
from ..corpus import Corpus, Node, build_corpus
from ..files import check_new_folder, describe_file, scratch_folder
from ..task import Qrels, Query, Task, write_task
from .jsonio import expect, read_json, require
from .multihop_questions import READERS, Paragraph, Question

SOURCES = ("paragraphs", "pool", "both")
_UNSAFE = re.compile(r"[\s\0]+")
_TITLE_LENGTH, _HASH_LENGTH = 60, 12


def document_id(paragraph: Paragraph) -> str:
    """The id of a paragraph: the beginning of its title, `_` for white space, and 48 bits of a hash of all of it."""
    # A length before the title, so that no other title and text run together to the same bytes.
    raw = f"{len(paragraph.title)} {paragraph.title}{paragraph.text}".encode(errors="surrogatepass")
    digest = hashlib.blake2b(raw, digest_size=_HASH_LENGTH // 2).hexdigest()
    return f"{_UNSAFE.sub('_', paragraph.title[:_TITLE_LENGTH])}-{digest}"


def read_pool(path: str | Path) -> Iterator[Paragraph]:
    """The passages of a corpus file, `[{title, text}]`; those with neither are left out.

    Raises:
        ValueError: a missing or mistyped field; names the place.
    """
    for number, row in enumerate(expect(read_json(path), list, str(path))):
        where = f"{path}[{number}]"
        title, text = (require(expect(row, dict, where), key, str, where).strip() for key in ("title", "text"))
        if title or text:
            yield Paragraph(title, text or title)


@dataclass(slots=True)
class _Documents:
    """Distinct paragraphs as nodes, in order of arrival."""

    nodes: list[Node] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    merged: int = 0

    def add(self, paragraph: Paragraph) -> None:
        node_id = document_id(paragraph)
        if node_id not in self.seen:
            self.seen[node_id] = len(self.nodes)
            self.nodes.append(Node(node_id, None, paragraph.title, paragraph.text))
            return
        known = self.nodes[self.seen[node_id]]
        if (known.title, known.text) != (paragraph.title, paragraph.text):
            raise ValueError(f"two paragraphs have the id {node_id!r}; change the title of one of them")
        self.merged += 1


@dataclass(slots=True)
class _Split:
    """What was read of one split."""

    queries: list[Query] = field(default_factory=list)
    qrels: Qrels = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    chains: dict[str, Chain] = field(default_factory=dict)
    unanswerable: int = 0
    empty: int = 0

    def add(self, question: Question) -> None:
        self.empty += question.empty
        if not question.answerable:
            self.unanswerable += 1
            return
        gold = tuple(
            document_id(p) if isinstance(p, Paragraph) else _UNSAFE.sub("_", f"missing:{question.id}:{p}")
            for p in question.gold
        )
        self.queries.append(Query(question.id, question.text))
        self.qrels[question.id] = dict.fromkeys(gold, 1)
        if question.answer:
            self.answers[question.id] = question.answer
        if gold:
            others = tuple(map(document_id, question.others))
            self.chains[question.id] = Chain(gold, question.ordered, others, question.kind)


def prep_multihop(
    dataset: str, files: Mapping[str, Path], out: str | Path, *, corpus: str = "paragraphs", pool: Path | None = None
) -> Task:
    """Write the task of official files: corpus, queries, judgements, reference answers and chains.

    dataset: `musique`, `hotpotqa` or `2wiki`.
    files: the file of each split; those of `test` may lack gold paragraphs.
    corpus: `paragraphs`: all paragraphs of all questions of these splits, so that splits prepared together share one
        corpus and each alone has its own; `pool`: only the passages of the file `pool`; `both`: first the paragraphs,
        then the pool. A larger corpus is harder to search and closer to the whole of Wikipedia.

    A gold paragraph that the corpus lacks stays in judgements and chain, under an id that nobody can find, so that it
    counts as not found; the manifest's `source.statistics` counts those, documents, merged duplicates, and the lengths
    and orders of chains. A distractor that the corpus lacks is left out.

    Raises:
        FileExistsError: `out` exists and is not an empty folder.
        ValueError: what is wrong with the data, named by file and line; or `corpus` and `pool` that do not fit.
    """
    if corpus not in SOURCES or (corpus == "paragraphs") != (pool is None):
        raise ValueError(
            f"corpus={corpus!r} with pool={pool}: use paragraphs without, or pool or both with a pool file"
        )
    check_new_folder(out)
    documents = _Documents()
    splits: dict[str, _Split] = {}
    for split, file in files.items():
        splits[split] = _Split()
        for question in READERS[dataset](file, labelled=split != "test"):
            splits[split].add(question)
            if corpus != "pool":
                for paragraph in question.paragraphs:  # not gold first: equal scores are ranked in corpus order
                    documents.add(paragraph)
    if pool is not None:
        for passage in read_pool(pool):
            documents.add(passage)
    if not documents.nodes:
        raise ValueError(f"{', '.join(map(str, files.values()))}: no paragraphs in them")
    with scratch_folder(out) as scratch:
        built = build_corpus(documents.nodes, scratch / "corpus")
        chains = {split: _findable(read.chains, built) for split, read in splits.items()}
        return write_task(
            out,
            name=dataset,
            corpus=built,
            splits={split: (read.queries, read.qrels) for split, read in splits.items()},
            answers={split: read.answers for split, read in splits.items()},
            chains=chains,
            source={
                "dataset": dataset,
                "corpus": corpus,
                "files": [describe_file(file) for file in (*files.values(), *([pool] if pool else []))],
                "statistics": {
                    "documents": len(built),
                    "merged_duplicates": documents.merged,
                    "splits": {split: _statistics(read, chains[split], built) for split, read in splits.items()},
                },
            },
            allow_dangling=True,
        )


def _findable(chains: Mapping[str, Chain], corpus: Corpus) -> dict[str, Chain]:
    """The chains with those distractors that the corpus has."""
    return {
        query_id: Chain(c.gold, c.ordered, tuple(d for d in c.distractors if d in corpus), c.kind)
        for query_id, c in chains.items()
    }


def _statistics(read: _Split, chains: Mapping[str, Chain], corpus: Corpus) -> dict[str, object]:
    missing = [sum(doc_id not in corpus for doc_id in chain.gold) for chain in chains.values()]
    return {
        "questions": len(read.queries),
        "unanswerable_left_out": read.unanswerable,
        "empty_paragraphs_left_out": read.empty,
        "chains": len(chains),
        "chain_lengths": _sorted_counts(str(len(chain.gold)) for chain in chains.values()),
        "kinds": _sorted_counts(chain.kind for chain in chains.values()),
        "ordered": sum(chain.ordered for chain in chains.values()),
        "distractors": sum(len(chain.distractors) for chain in chains.values()),
        "gold": sum(len(chain.gold) for chain in chains.values()),
        "missing_gold": sum(missing),
        "questions_with_missing_gold": sum(count > 0 for count in missing),
    }


def _sorted_counts(values: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def report(task: Task) -> list[str]:
    """What the manifest of such a task counts, a line for the corpus and one or two for each split; [] of any other."""
    source = task.manifest.get("source")
    statistics = source.get("statistics") if isinstance(source, dict) else None
    if not isinstance(statistics, dict):
        return []
    lines = [
        f"{statistics['documents']:,} documents; {statistics['merged_duplicates']:,} equal paragraphs were merged "
        "into them"
    ]
    for split, counts in statistics["splits"].items():
        lengths = ", ".join(f"{number:,} of {length}" for length, number in counts["chain_lengths"].items())
        share = counts["ordered"] / counts["chains"] if counts["chains"] else 0.0
        lines.append(
            f"{split}: {counts['questions']:,} questions, chains of gold documents: {lengths or 'none'}; "
            f"{share:.1%} ordered; {counts['distractors']:,} distractors"
        )
        if counts["missing_gold"]:
            lines.append(
                f"{split}: {counts['missing_gold']:,} of {counts['gold']:,} gold documents are not in the corpus "
                f"({counts['questions_with_missing_gold']:,} questions); they count as not found"
            )
        for key in ("unanswerable_left_out", "empty_paragraphs_left_out"):
            if counts[key]:
                lines.append(f"{split}: {counts[key]:,} {key.replace('_', ' ')}")
    return lines
