"""`Corpus`: a tree of texts in memory-mapped columns, opened at once whatever its size.

A saved corpus is a folder: `nodes.arrow` (id, title, text), `structure.arrow` (parent, first child, id index)
and `manifest.json`. Both Arrow files are in the IPC file format and are mapped, not read: several processes
on one machine share one copy.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from . import corpus_build
from .corpus_build import Arrivals, Fingerprint, Ints, Node, Structure
from .files import check_new_folder, new_folder
from .formats.jsonio import read_json, require

__all__ = ["Corpus", "Node", "build_corpus"]

FORMAT = "retrail-corpus"
FORMAT_VERSION = 1
_STRUCTURE_SCHEMA = pa.schema(
    [("parent", pa.int64()), ("first_child", pa.int64()), ("id_hash", pa.uint64()), ("id_row", pa.int64())]
)
_FILES = ("nodes.arrow", "structure.arrow")


class Corpus:
    """An immutable tree (or, with one level, a flat list) of nodes.

    A *row* is a node's number in level order: first the root level, then the children of the first root,
    of the second, and so on. So the children of a row are a contiguous range, and a level is one too.
    Make one with `Corpus.from_nodes`, `Corpus.open` or `build_corpus`.
    """

    def __init__(self, batches: list[pa.RecordBatch], structure: Structure, fingerprint: str) -> None:
        self._batches = batches
        self._structure = structure
        structure.parent.flags.writeable = False
        self._batch_starts = [0]
        for batch in batches:
            self._batch_starts.append(self._batch_starts[-1] + batch.num_rows)
        self._len = self._batch_starts.pop()
        self._columns = [[corpus_build.string_buffers(batch.column(c)) for batch in batches] for c in range(3)]
        # Scalar reads from a memoryview take half the time of those from a NumPy array.
        self._parent = structure.parent.data
        self._first_child = structure.first_child.data
        self._id_hash = structure.id_hash.data
        self._id_row = structure.id_row.data
        self._level_starts = self._find_levels()
        self._leaves: Ints | None = None
        self.fingerprint = fingerprint
        """Hex sha256 over ids, parents, titles and texts, order included."""

    @classmethod
    def from_nodes(cls, nodes: Iterable[Node]) -> Self:
        """A corpus in memory.

        Raises:
            ValueError: no nodes; an id that is empty, repeated or has a NUL or line end in it; a text that is empty
                after stripping; a parent that is not there; a cycle. The message names the node.
        """
        arrivals = Arrivals()
        arrivals.extend(nodes)
        structure, order = arrivals.arrange()
        batches = list(arrivals.batches(order))
        fingerprint = Fingerprint(structure.parent)
        for batch in batches:
            fingerprint.update(batch)
        return cls(batches, structure, fingerprint.hexdigest())

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map the corpus of a folder written by `save` or `build_corpus`. Texts are not read or re-hashed.

        Raises:
            FileNotFoundError: no folder, or a file of it is missing.
            ValueError: not a corpus, another format version, or a file that was cut off or changed in size.
        """
        folder = Path(path)
        manifest = _read_manifest(folder)
        where = str(folder / "manifest.json")
        num_nodes = require(manifest, "nodes", int, where)
        sizes = require(manifest, "files", dict, where)
        for name in _FILES:
            _check_size(folder / name, require(sizes, name, int, f"{where}['files']"))
        batches = _map_batches(folder / "nodes.arrow", corpus_build.NODE_SCHEMA)
        [columns] = _map_batches(folder / "structure.arrow", _STRUCTURE_SCHEMA)
        structure = Structure(*(column.to_numpy(zero_copy_only=True) for column in columns.columns))
        if not sum(batch.num_rows for batch in batches) == columns.num_rows == num_nodes:
            raise ValueError(f"{folder}: its files and its manifest disagree on the number of nodes; build it again")
        return cls(batches, structure, require(manifest, "fingerprint", str, where))

    def save(self, path: str | Path) -> None:
        """Write a folder that `open` reads. It appears whole or not at all.

        Raises:
            FileExistsError: `path` exists and is not an empty folder.
        """
        with new_folder(path) as folder:
            self.write_into(folder)

    def write_into(self, folder: Path) -> None:
        """Write the files of a corpus into an existing folder (which is not yet in its final place)."""
        _write(folder / "nodes.arrow", corpus_build.NODE_SCHEMA, self._batches)
        _write_structure(folder, self._structure)
        _write_manifest(folder, len(self), self.fingerprint)

    def __len__(self) -> int:
        return self._len

    def __repr__(self) -> str:
        return f"Corpus({len(self)} nodes on {self.num_levels} levels, {self.fingerprint[:12]})"

    def __contains__(self, node_id: object) -> bool:
        return isinstance(node_id, str) and self._find(node_id) is not None

    def __iter__(self) -> Iterator[Node]:
        """The nodes in row order: fed to `from_nodes`, they give an equal corpus."""
        return map(self.node, range(len(self)))

    def node(self, row: int) -> Node:
        """The node of a row."""
        parent = self.parent(row)
        return Node(self.id(row), None if parent < 0 else self.id(parent), self.title(row), self.text(row))

    @property
    def num_levels(self) -> int:
        """1 for a flat corpus."""
        return len(self._level_starts) - 1

    @property
    def parents(self) -> Ints:
        """Row of each row's parent, -1 on the root level; read-only, shape (len(self),)."""
        return self._structure.parent

    def row(self, node_id: str) -> int:
        """The row of an id.

        Raises:
            KeyError: no such id.
        """
        row = self._find(node_id)
        if row is None:
            raise KeyError(f"no node {node_id!r} in this corpus of {len(self)} nodes")
        return row

    def _find(self, node_id: str) -> int | None:
        raw = node_id.encode(errors="surrogatepass")
        wanted = corpus_build.hash_id(raw)
        position = bisect_left(self._id_hash, wanted)
        while position < self._len and self._id_hash[position] == wanted:
            row = self._id_row[position]
            if self._raw(0, row) == raw:
                return row
            position += 1
        return None

    def _raw(self, column: int, row: int) -> memoryview:
        batch = bisect_right(self._batch_starts, row) - 1
        offsets, data = self._columns[column][batch]
        local = row - self._batch_starts[batch]
        return data[offsets[local] : offsets[local + 1]]

    def _check(self, row: int) -> None:
        if not 0 <= row < self._len:
            raise IndexError(f"row {row} is outside this corpus of {self._len} nodes")

    def id(self, row: int) -> str:
        """The id of a row. Raises IndexError outside the corpus, as all that take a row."""
        self._check(row)
        return str(self._raw(0, row), "utf-8")

    def title(self, row: int) -> str:
        """The title of a row, which may be empty."""
        self._check(row)
        return str(self._raw(1, row), "utf-8")

    def text(self, row: int) -> str:
        """The text of a row, never empty."""
        self._check(row)
        return str(self._raw(2, row), "utf-8")

    def strings(self, column: str, rows: range) -> list[str]:
        """The "id", "title" or "text" of neighbouring rows, for a tenth of the time that one by one takes.

        Raises:
            IndexError: some rows are outside the corpus.
            ValueError: the rows have gaps, or there is no such column.
        """
        if rows.step != 1:
            raise ValueError(f"{rows} has gaps; ask for neighbouring rows")
        number = corpus_build.NODE_SCHEMA.names.index(column)
        found: list[str] = []
        while rows:
            self._check(rows.start)
            self._check(rows.stop - 1)
            batch = bisect_right(self._batch_starts, rows.start) - 1
            first = rows.start - self._batch_starts[batch]
            part = self._batches[batch].column(number).slice(first, len(rows))
            found += part.to_pylist()
            rows = rows[len(part) :]
        return found

    def are_leaves(self, rows: Ints) -> np.ndarray:
        """`is_leaf` of many rows at once, a mask of their shape."""
        first = self._structure.first_child
        below = np.where(rows + 1 < self._len, first[np.minimum(rows + 1, self._len - 1)], self._len)
        return np.asarray(below == first[rows])

    def parent(self, row: int) -> int:
        """The row of the parent, -1 on the root level."""
        self._check(row)
        return self._parent[row]

    def level(self, row: int) -> int:
        """0 on the root level."""
        self._check(row)
        return bisect_right(self._level_starts, row) - 1

    def level_rows(self, level: int) -> range:
        """The rows of a level.

        Raises:
            IndexError: no such level.
        """
        if not 0 <= level < self.num_levels:
            raise IndexError(f"level {level} is outside this corpus of {self.num_levels} levels")
        return range(self._level_starts[level], self._level_starts[level + 1])

    def children(self, row: int | None) -> range:
        """The rows of the children in reading order, empty for a leaf; of None: the root level."""
        if row is None:
            return range(self._level_starts[1])
        self._check(row)
        end = self._first_child[row + 1] if row + 1 < self._len else self._len
        return range(self._first_child[row], end)

    def is_leaf(self, row: int) -> bool:
        """Whether the row has no children."""
        return len(self.children(row)) == 0

    def open_rows(self, rows: Ints) -> tuple[Ints, Ints]:
        """All children of `rows`, one after the other, and how many each has (0: a leaf); at the speed of NumPy.

        Raises:
            IndexError: a row outside the corpus.
        """
        first = self._structure.first_child
        if len(rows) and not 0 <= rows.min() <= rows.max() < self._len:
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not all in this corpus of {self._len} nodes")
        starts = first[rows]
        counts = np.where(rows + 1 < self._len, first[np.minimum(rows + 1, self._len - 1)], self._len) - starts
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(starts, counts) + places, counts

    def path(self, row: int) -> tuple[int, ...]:
        """The rows from the root level down to `row`."""
        self._check(row)
        rows = [row]
        while (row := self._parent[row]) >= 0:
            rows.append(row)
        return tuple(reversed(rows))

    def leaves(self) -> Ints:
        """The rows of all leaves in reading order (depth-first), read-only. Computed once, 16 bytes a node."""
        if self._leaves is None:
            leaves = np.flatnonzero(np.diff(self._structure.first_child, append=self._len) == 0)
            walk = corpus_build.preorder(self._structure, self._level_starts)
            self._leaves = leaves[np.argsort(walk[leaves])]
            self._leaves.flags.writeable = False
        return self._leaves

    def _find_levels(self) -> list[int]:
        starts = [0]
        while starts[-1] < self._len:
            start = self._first_child[starts[-1]]
            if not starts[-1] < start <= self._len:
                raise ValueError(f"the structure of the corpus is damaged at row {starts[-1]}; build it again")
            starts.append(start)
        return starts


def build_corpus(nodes: Iterable[Node], path: str | Path) -> Corpus:
    """Write the corpus of a stream of nodes to a folder, and open it.

    Titles and texts go to temporary files inside that folder's parent and from there, batch by batch, into
    level order: memory holds ids and about 100 bytes a node, whatever the texts' length. The disk needs
    twice the size of the texts while it runs.

    Raises:
        FileExistsError: `path` exists and is not an empty folder.
        ValueError: as `Corpus.from_nodes`; nothing is left behind.
    """
    check_new_folder(path)
    with new_folder(path) as folder:
        title_path, text_path = folder / "titles.tmp", folder / "texts.tmp"
        with title_path.open("xb+") as titles, text_path.open("xb+") as texts:
            arrivals = Arrivals(titles, texts)
            arrivals.extend(nodes)
            structure, order = arrivals.arrange()
            fingerprint = Fingerprint(structure.parent)
            _write(folder / "nodes.arrow", corpus_build.NODE_SCHEMA, _tee(arrivals.batches(order), fingerprint))
        title_path.unlink()
        text_path.unlink()
        _write_structure(folder, structure)
        _write_manifest(folder, len(order), fingerprint.hexdigest())
    return Corpus.open(path)


def _tee(batches: Iterable[pa.RecordBatch], fingerprint: Fingerprint) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        fingerprint.update(batch)
        yield batch


def _write(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _write_structure(folder: Path, structure: Structure) -> None:
    columns = [pa.array(getattr(structure, field.name)) for field in _STRUCTURE_SCHEMA]
    batch = pa.RecordBatch.from_arrays(columns, schema=_STRUCTURE_SCHEMA)
    _write(folder / "structure.arrow", _STRUCTURE_SCHEMA, [batch])


def _write_manifest(folder: Path, num_nodes: int, fingerprint: str) -> None:
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "nodes": num_nodes,
        "fingerprint": fingerprint,
        "files": {name: (folder / name).stat().st_size for name in _FILES},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, object]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; a corpus is a folder with a manifest.json")
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f'{folder / "manifest.json"}: not the manifest of a corpus (no "format": "{FORMAT}")')
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder}: corpus format version {manifest.get('format_version')!r}, but this code reads version "
            f"{FORMAT_VERSION}; build the corpus again"
        )
    return manifest


def _check_size(file: Path, expected: int) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing; the corpus is incomplete, build it again")
    if (actual := file.stat().st_size) != expected:
        raise ValueError(f"{file}: {actual} bytes, but its manifest says {expected}; it was cut off or changed")


def _map_batches(file: Path, schema: pa.Schema) -> list[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        if not reader.schema.equals(schema):
            raise ValueError(f"{file}: its columns are {reader.schema.names}, not {schema.names}")
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file}: damaged ({error}); build the corpus again") from error
