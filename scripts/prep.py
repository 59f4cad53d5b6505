"""`retrail prep`: a data set in its published format becomes a prepared folder."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import run_command
from .config import PrepData, PrepRun

if TYPE_CHECKING:
    from ..data_prep.corpus import Corpus
    from ..data_prep.task import Task

SPLIT_NAMES = {"train": "train", "validation": "dev", "dev": "dev", "test": "test"}

# Names of the official files of questions.
MULTIHOP_FILES = {"musique": "musique_*.json*", "hotpotqa": "hotpot_*.json*", "2wiki": "*.json*"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(PrepRun, prepare, argv)


def prepare(run: PrepRun) -> None:
    """Write the folder `run.out`, whole or not at all, and say what is in it.

    Raises:
        FileExistsError: `out` holds something, and is not a prepared folder or may not be overwritten.
        FileNotFoundError: a raw file is missing.
        ValueError: what is wrong with the raw files.
    """
    from ..data_prep.corpus import Corpus
    from ..data_prep.formats.multihop import report as multihop_report

    out = Path(run.out)
    if not run.overwrite or not _holds_something(out):
        _refuse_to_replace(out)
        written = _read(run, out)
    else:
        if not _is_prepared(out):
            raise FileExistsError(f"out={out} is not a prepared folder, so that overwrite=true would lose other files")
        written = _replace(run, out)
    corpus = written if isinstance(written, Corpus) else written.corpus
    print(f"{run.out}: {len(corpus):,} nodes on {corpus.num_levels} levels, {len(corpus.leaves()):,} of them leaves")
    if isinstance(written, Corpus):
        return
    for line in multihop_report(written):
        print(f"  {line}")
    for split in written.splits:
        judged = sum(1 for judgements in written.qrels(split).values() if judgements)
        print(f"  {split}: {len(written.queries(split)):,} queries, {judged:,} of them with judgements")


def _holds_something(out: Path) -> bool:
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _refuse_to_replace(out: Path) -> None:
    if not _holds_something(out):
        return
    if _is_prepared(out):
        raise FileExistsError(f"out={out} is already prepared; overwrite=true replaces it, out=... writes elsewhere")
    raise FileExistsError(f"out={out} exists and is not a prepared folder; choose another with out=...")


def _is_prepared(out: Path) -> bool:
    manifest = out / "manifest.json"
    if not manifest.is_file():
        return False
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("format") in ("retrail-task", "retrail-corpus")


def _replace(run: PrepRun, out: Path) -> Task | Corpus:
    """Write the new folder beside the old one, then change places; a failure leaves the old one where it was."""
    from ..data_prep.corpus import Corpus
    from ..data_prep.files import swap_folder
    from ..data_prep.task import Task

    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        new, old = Path(folder) / "new", Path(folder) / "old"
        written = _read(run, new)
        swap_folder(new, out, old)
        shutil.rmtree(old)
    return Corpus.open(out) if isinstance(written, Corpus) else Task.open(out)


def _read(run: PrepRun, out: Path) -> Task | Corpus:
    if run.data.name == "pydocs":
        from ..data_prep.formats.pydocs import prep_pydocs

        return prep_pydocs(out)
    folder = Path(run.path or "")
    if not folder.is_dir():
        raise FileNotFoundError(f"path={folder}: no such folder")
    if run.data.name == "beir":
        from ..data_prep.formats.beir import prep_beir

        options = run.data
        return prep_beir(
            folder, out, splits=options.splits, skip_empty=options.skip_empty, allow_dangling=options.allow_dangling
        )
    if run.data.name in ("markdown", "html"):
        return _read_pages(run.data, folder, out)
    if run.data.name == "conditionalqa":
        return _read_conditionalqa(run.data, folder, out)
    if run.data.name in ("tree", "update"):
        from .prep_tree import prep_tree, prep_update

        return (prep_tree if run.data.name == "tree" else prep_update)(run.data, folder, out)
    if run.data.name == "mtrag":
        from ..data_prep.formats.mtrag import prep_mtrag

        return prep_mtrag(folder, out, domain=run.data.domain, skip_missing=run.data.skip_missing)
    if run.data.name in MULTIHOP_FILES:
        return _read_multihop(run.data, folder, out)
    return _read_multidoc2dial(run.data, folder, out)


def _read_pages(data: PrepData, folder: Path, out: Path) -> Task | Corpus:
    from ..data_prep.formats.headings import prep_pages
    from ..data_prep.formats.html import html_nodes
    from ..data_prep.formats.markdown import markdown_nodes

    nodes = html_nodes(folder) if data.name == "html" else markdown_nodes(folder)
    return prep_pages(folder, out, nodes, folder.resolve().name, data.queries, data.qrels)


def _read_conditionalqa(data: PrepData, folder: Path, out: Path) -> Task:
    from ..data_prep.formats.conditionalqa import prep_conditionalqa

    documents = folder / data.documents if data.documents else _first(folder, "documents")
    names = {"train": "train", "dev": "dev", "test": "test_no_answer"}
    splits = data.splits or ["train", "dev"]
    if unknown := set(splits) - set(names):
        raise ValueError(f"data.splits: ConditionalQA has no {', '.join(sorted(unknown))}; it has {', '.join(names)}")
    return prep_conditionalqa(documents, {split: _first(folder, names[split]) for split in splits}, out)


def _first(folder: Path, name: str) -> Path:
    """The official file of that name, in the folder or its `v1_0`, plain or gzipped."""
    for inside in (folder, folder / "v1_0"):
        for ending in (".json", ".json.gz"):
            if (inside / f"{name}{ending}").is_file():
                return inside / f"{name}{ending}"
    raise FileNotFoundError(f"path={folder} has no {name}.json (nor {name}.json.gz), nor has its folder v1_0")


def _read_multihop(data: PrepData, folder: Path, out: Path) -> Task:
    from ..data_prep.formats.multihop import prep_multihop

    if data.files is not None:
        found = [folder / name for name in data.files]
    else:
        found = [file for file in sorted(folder.glob(MULTIHOP_FILES[data.name])) if len(_splits_in(file)) == 1]
    wanted = data.splits or (["train", "dev", "test"] if data.files else ["train", "dev"])
    if unknown := set(wanted) - set(SPLIT_NAMES.values()):
        raise ValueError(f"data.splits: {', '.join(sorted(unknown))} is none of train, dev, test")
    files = _by_split([file for file in found if data.files or set(_splits_in(file)) <= set(wanted)], "data.files")
    missing = [split for split in wanted if split not in files]
    if not files or (data.splits and missing):
        raise FileNotFoundError(
            f"path={folder} has no file of {' or '.join(missing)} named {MULTIHOP_FILES[data.name]}; name the files "
            "with data.files=[...]"
        )
    pool = None if data.corpus == "paragraphs" else _pool_file(data, folder)
    chosen = {split: file for split, file in files.items() if split in wanted}
    return prep_multihop(data.name, chosen, out, corpus=data.corpus, pool=pool)


def _pool_file(data: PrepData, folder: Path) -> Path:
    found = [folder / data.documents] if data.documents else sorted(folder.glob("*corpus*.json*"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise FileNotFoundError(
            f"path={folder} has {len(found)} files named *corpus*.json ({names}); name one with data.documents=..."
        )
    return found[0]


def _read_multidoc2dial(data: PrepData, folder: Path, out: Path) -> Task:
    from ..data_prep.formats.multidoc2dial import prep_multidoc2dial

    if data.documents is None:
        found = sorted(folder.glob("*doc2dial_doc*.json*"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise FileNotFoundError(
                f"path={folder} has {len(found)} files named *doc2dial_doc*.json ({names}); "
                "name one with data.documents=..."
            )
        documents = found[0]
    else:
        documents = folder / data.documents
    if data.dialogues is None:
        dialogues = sorted(folder.glob("*doc2dial_dial_*.json*"))
    else:
        dialogues = [folder / name for name in data.dialogues]
    if not dialogues:
        raise FileNotFoundError(
            f"path={folder} has no file named *doc2dial_dial_*.json; name it with data.dialogues=[...]"
        )
    by_file = data.split_by == "files" or (data.split_by == "auto" and len(dialogues) > 1)
    return prep_multidoc2dial(
        documents,
        _by_split(dialogues) if by_file else dialogues,
        out,
        segmentation=data.segmentation,
        words=data.words,
        domain_level=data.domain_level,
        skip_missing=data.skip_missing,
    )


def _splits_in(file: Path) -> list[str]:
    return [SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", file.name.lower()) if word in SPLIT_NAMES]


def _by_split(files: Sequence[Path], option: str = "data.dialogues") -> dict[str, Path]:
    """Each file under the split in its name; `option` names files by hand.

    Raises:
        ValueError: a name without a split, or two of the same.
    """
    splits: dict[str, Path] = {}
    for file in files:
        words = _splits_in(file)
        if len(words) != 1:
            hint = "; use data.split_by=hash" if option == "data.dialogues" else ""
            raise ValueError(f"{file}: no split in its name ({', '.join(SPLIT_NAMES)}){hint}")
        if words[0] in splits:
            raise ValueError(f"{file} and {splits[words[0]].name} are both {words[0]!r}; name the files with {option}")
        splits[words[0]] = file
    return {name: splits[name] for name in ("train", "dev", "test") if name in splits}


if __name__ == "__main__":
    sys.exit(main())
