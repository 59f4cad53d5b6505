"""`retrail prep data=tree` and `data=update`: groups above a prepared folder's pages, and pages in and out of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import PrepData

if TYPE_CHECKING:
    import numpy as np

    from ..data_prep.chains import Chain
    from ..data_prep.corpus import Corpus, Node
    from ..data_prep.task import Task
    from ..data_prep.tree import Tree

    Encode = Callable[[Sequence[str]], np.ndarray]


def prep_tree(data: PrepData, folder: Path, out: Path, encode: Encode | None = None) -> Task | Corpus:
    """Put groups above the root level of the corpus in `folder`, queries and judgements kept, and write it to `out`.

    encode: texts to vectors (None: the encoder that `data.encoder` names).

    Raises:
        FileNotFoundError, ValueError: as `open_corpus`, `cluster_pages` and `balanced_tree`.
    """
    from ..data_prep.files import check_new_folder
    from ..data_prep.tree import balanced_tree, cluster_pages, page_texts
    from ..models.load import open_corpus

    check_new_folder(out)
    corpus = open_corpus(folder)
    pages = len(corpus.children(None))
    if data.groups is not None and data.groups > pages:  # before minutes of encoding
        raise ValueError(f"data.groups={data.groups} but path={folder} has {pages} pages; choose fewer groups")
    vectors = (encode or open_encode(data.encoder))(page_texts(corpus))
    if data.groups is not None:
        tree = cluster_pages(corpus, vectors, data.groups, balanced=data.balanced, seed=data.seed, encoder=data.encoder)
    else:
        assert data.branching is not None
        tree = balanced_tree(corpus, vectors, data.branching, seed=data.seed, encoder=data.encoder)
    return _write(_summarised(tree, data.summaries, out), folder, out)


def prep_update(data: PrepData, folder: Path, out: Path, encode: Encode | None = None) -> Task | Corpus:
    """Take `data.remove` out of the tree in `folder`, put the pages of `data.add` in, and say which groups changed.

    Raises:
        FileNotFoundError, KeyError, ValueError: as `Tree.open`, `add_documents` and `remove_documents`.
    """
    from ..data_prep.files import check_new_folder
    from ..data_prep.tree import Tree, page_text
    from ..data_prep.tree_update import add_documents, remove_documents

    check_new_folder(out)
    tree = Tree.open(_corpus_folder(folder))
    updates = []
    if data.remove:
        updates.append(remove_documents(tree, data.remove))
        tree = updates[-1].tree
    if data.add:
        nodes = read_nodes(Path(data.add))
        texts = [page_text(node.title, node.text) for node in nodes if node.parent is None]
        updates.append(add_documents(tree, nodes, (encode or open_encode(tree.encoder))(texts)))
        tree = updates[-1].tree
    stale = {group.id for update in updates for group in update.stale}
    written = _write(_summarised(tree, data.summaries, out, stale), folder, out)
    for update in updates:
        for group_id in update.dropped:
            print(f"  dropped: {group_id} holds no page any more")
        for group in update.stale:
            changes = f"+{group.added} -{group.removed} of {group.before} pages ({group.change:.1%})"
            print(f"  stale: {group.id} {changes}")
    return written


def read_nodes(file: Path) -> list[Node]:
    """Pages of a JSON Lines file: `_id`, `title`, `text`, and `parent` for what stands below a page of the same file.

    Raises:
        FileNotFoundError, ValueError: no such file, no line in it, or a missing field; names file and line.
    """
    from ..data_prep.corpus import Node
    from ..data_prep.formats.jsonio import optional, read_jsonl, require

    nodes = []
    for number, row in read_jsonl(file):
        where = f"{file}:{number}"
        parent = None if row.get("parent") is None else require(row, "parent", str, where)
        title, text = optional(row, "title", str, where, ""), optional(row, "text", str, where, "")
        if not (text.strip() or title.strip()):
            raise ValueError(f"{where}: neither title nor text; leave the line out")
        nodes.append(Node(require(row, "_id", str, where), parent, title, text if text.strip() else title))
    if not nodes:
        raise ValueError(f"{file}: no documents in it")
    return nodes


def open_encode(name: str) -> Encode:
    """Texts to vectors, by a sentence-transformers model. Raises ImportError, ValueError as `open_encoder`."""
    from ..models.sentence import open_encoder

    encoder = open_encoder(name)

    def encode(texts: Sequence[str]) -> np.ndarray:
        vectors: np.ndarray = encoder.encode_document(list(texts), convert_to_numpy=True, show_progress_bar=True)
        return vectors

    return encode


def _summarised(tree: Tree, name: str | None, out: Path, only: Collection[str] | None = None) -> Tree:
    """The tree with a sentence by the language model of that name about each group, or about those of `only`."""
    if name is None:
        return tree
    from ..models.lm import open_language_model
    from ..models.summaries import summarise_groups

    cache = out.with_name(f"{out.name}.summaries.jsonl")
    summaries = summarise_groups(tree, open_language_model(name), cache, only=only)
    for group_id in summaries.failed:
        print(f"  no sentence for {group_id}: it keeps its titles")
    return summaries.tree


def _corpus_folder(folder: Path) -> Path:
    return folder / "corpus" if (folder / "corpus").is_dir() else folder


def _there(chain: Chain, corpus: Corpus) -> Chain:
    """A chain without the distractors that were taken out of the corpus."""
    return replace(chain, distractors=tuple(doc for doc in chain.distractors if doc in corpus))


def _write(tree: Tree, folder: Path, out: Path) -> Task | Corpus:
    """The tree, with queries, judgements, answers and chains of `folder` where it is a task."""
    from ..data_prep.corpus import Corpus
    from ..data_prep.files import new_folder
    from ..data_prep.task import Task, write_task

    if _corpus_folder(folder) == folder:
        tree.save(out)
        return Corpus.open(out)
    task = Task.open(folder)
    splits = {split: (task.queries(split), task.qrels(split)) for split in task.splits}
    source = {"dataset": task.name, "task_fingerprint": task.fingerprint, "encoder": tree.encoder}
    answers = {split: known for split in task.splits if (known := task.answers(split))}
    chains = {
        split: {query: _there(chain, tree.corpus) for query, chain in needed.items()}
        for split in task.splits
        if (needed := task.chains(split))
    }
    more: dict[str, Any] = {"allow_dangling": True, "answers": answers or None, "chains": chains or None}
    with new_folder(out) as new:
        write_task(new, name=task.name, corpus=tree.corpus, splits=splits, source=source, **more)
        tree.write_groups(new / "corpus")
    return Task.open(out)
