"""From nodes in any order to flat columns in level order, with text held on disk and not in memory.

Letters in names: n nodes; an *arrival* is a node's number in the iterable, a *row* its number in level order.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

ROWS_PER_BATCH = 16_384
BYTES_PER_BATCH = 32 << 20

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_FORBIDDEN_IN_IDS = ("\0", "\n", "\r")


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a corpus tree. The order of an iterable of nodes is the reading order among siblings.

    `parent` is None on the root level; a parent may come after its children.
    """

    id: str
    parent: str | None
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of the tree and the id index, as columns over n rows.

    parent: row of the parent, -1 on the root level.
    first_child: the children of row r are rows first_child[r] to first_child[r + 1] (n after the last).
    id_hash: 64-bit hashes of the ids, ascending; id_row: the row of each.
    """

    parent: Ints
    first_child: Ints
    id_hash: Hashes
    id_row: Ints


def hash_id(raw: bytes) -> int:
    """64 bits of BLAKE2b: the same on every machine, unlike `hash()`."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


class _Column:
    """Byte strings appended one by one, in memory or in a file, and read back in any order."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = file
        self._memory = bytearray()
        self._size = 0
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, raw: bytes) -> None:
        if self._file is None:
            self._memory += raw
        else:
            self._file.write(raw)
        self._size += len(raw)
        self._ends.append(self._size)

    def finish(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _read(self, start: int, end: int) -> bytes:
        if self._file is None:
            return bytes(memoryview(self._memory)[start:end])
        raw = os.pread(self._file.fileno(), end - start, start)
        if len(raw) != end - start:
            raise OSError(f"read {len(raw)} of {end - start} bytes at {start} of the temporary file {self._file.name}")
        return raw

    def get(self, item: int) -> bytes:
        return self._read(self._ends[item], self._ends[item + 1])

    def lengths(self) -> Ints:
        ends: Ints = np.frombuffer(self._ends, dtype=np.int64)
        return ends[1:] - ends[:-1]

    def take(self, items: Ints) -> pa.LargeStringArray:
        """The strings of these items. Runs of neighbours are read at once, so depth-first arrival is fast."""
        ends = np.frombuffer(self._ends, dtype=np.int64)
        breaks = np.flatnonzero(np.diff(items) != 1) + 1
        firsts = items[np.concatenate(([0], breaks))]
        lasts = items[np.concatenate((breaks - 1, [len(items) - 1]))]
        data = b"".join(map(self._read, ends[firsts].tolist(), ends[lasts + 1].tolist()))
        offsets = np.zeros(len(items) + 1, dtype=np.int64)
        np.cumsum(ends[items + 1] - ends[items], out=offsets[1:])
        return pa.LargeStringArray.from_buffers(len(items), pa.py_buffer(offsets), pa.py_buffer(data))


class Arrivals:
    """Takes nodes one by one, checks each alone, then all together, then gives batches in level order.

    Memory: about 60 bytes and the id a node; titles and texts go to the two files, where given.
    """

    def __init__(self, title_file: IO[bytes] | None = None, text_file: IO[bytes] | None = None) -> None:
        self._ids = _Column()
        self._titles = _Column(title_file)
        self._texts = _Column(text_file)
        self._hashes = array("Q")
        # Siblings usually arrive together, so a parent's id is stored once a run of equal parents.
        self._parents = _Column()
        self._parent_hashes = array("Q")
        self._parent_run = array("q")
        self._last_parent: str | None = None

    def extend(self, nodes: Iterable[Node]) -> None:
        """Take all nodes.

        Raises:
            ValueError: an id, title or text that cannot be stored, named by its node; or no nodes at all.
        """
        for node in nodes:
            self._add(node)
        if not len(self._ids):
            raise ValueError("the corpus is empty: there must be at least one node")
        self._titles.finish()
        self._texts.finish()

    def _add(self, node: Node) -> None:
        arrival = len(self._ids)
        raw_id = self._check_id(node.id, arrival)
        for name, value in (("title", node.title), ("text", node.text)):
            if not isinstance(value, str):
                raise ValueError(f"node {node.id!r}: its {name} is {type(value).__name__}, not a string")
        if not node.text or node.text.isspace():
            raise ValueError(f"node {node.id!r} has an empty text; give it some (if only its title) or drop it")
        try:
            raw_title, raw_text = node.title.encode(), node.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"node {node.id!r}: its title or text has a lone surrogate ({error})") from error
        self._ids.append(raw_id)
        self._titles.append(raw_title)
        self._texts.append(raw_text)
        self._hashes.append(hash_id(raw_id))
        self._add_parent(node)

    def _add_parent(self, node: Node) -> None:
        if node.parent is None:
            self._parent_run.append(-1)
            return
        if node.parent != self._last_parent:
            raw = self._check_id(node.parent, len(self._ids) - 1, f"the parent of node {node.id!r}")
            self._parents.append(raw)
            self._parent_hashes.append(hash_id(raw))
            self._last_parent = node.parent
        self._parent_run.append(len(self._parents) - 1)

    @staticmethod
    def _check_id(node_id: object, arrival: int, what: str = "its id") -> bytes:
        where = f"node number {arrival + 1}: {what}"
        if not isinstance(node_id, str):
            raise ValueError(f"{where} is {node_id!r}, not a string")
        if not node_id.strip():
            raise ValueError(f"{where} is empty")
        for character in _FORBIDDEN_IN_IDS:
            if character in node_id:
                raise ValueError(f"{where} is {node_id!r}; ids must not contain {character!r}")
        try:
            return node_id.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} is {node_id!r}, which has a lone surrogate") from error

    def _name(self, arrival: int) -> str:
        return repr(self._ids.get(arrival).decode())

    def arrange(self) -> tuple[Structure, Ints]:
        """The structure over rows, and the arrival of each row.

        Raises:
            ValueError: an id twice, an unknown parent or a cycle, named by its nodes.
        """
        hashes: Hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        by_hash = np.argsort(hashes, kind="stable")
        sorted_hashes = hashes[by_hash]
        self._check_unique(sorted_hashes, by_hash)
        parent = self._resolve_parents(sorted_hashes, by_hash)
        order = level_order(parent)
        if len(order) < len(parent):
            raise ValueError(self._describe_cycle(parent, order))
        row_of = np.empty_like(order)
        row_of[order] = np.arange(len(order))
        moved = parent[order]
        num_roots = int((parent < 0).sum())
        num_children = np.bincount(parent[parent >= 0], minlength=len(parent))[order]
        structure = Structure(
            parent=np.where(moved < 0, -1, row_of[moved]),
            first_child=num_roots + np.cumsum(num_children) - num_children,
            id_hash=sorted_hashes,
            id_row=row_of[by_hash],
        )
        return structure, order

    def _check_unique(self, sorted_hashes: Hashes, by_hash: Ints) -> None:
        equal = np.flatnonzero(sorted_hashes[1:] == sorted_hashes[:-1])
        seen: dict[bytes, int] = {}
        for position in np.unique(np.concatenate((equal, equal + 1))).tolist():
            arrival = int(by_hash[position])
            raw = self._ids.get(arrival)
            if raw in seen:
                first, second = sorted((seen[raw], arrival))
                raise ValueError(f"id {raw.decode()!r} appears twice: as node number {first + 1} and {second + 1}")
            seen[raw] = arrival

    def _resolve_parents(self, sorted_hashes: Hashes, by_hash: Ints) -> Ints:
        """Arrival of each node's parent, -1 for roots. Equal hashes are told apart by comparing the ids."""
        wanted: Hashes = np.frombuffer(self._parent_hashes, dtype=np.uint64)
        starts = np.searchsorted(sorted_hashes, wanted, side="left").tolist()
        stops = np.searchsorted(sorted_hashes, wanted, side="right").tolist()
        found = np.empty(len(wanted) + 1, dtype=np.int64)
        found[-1] = -1  # where run number -1, the roots, points
        run_of: Ints = np.frombuffer(self._parent_run, dtype=np.int64)
        for run, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            raw = self._parents.get(run)
            for arrival in by_hash[start:stop].tolist():
                if self._ids.get(arrival) == raw:
                    found[run] = arrival
                    break
            else:
                child = int(np.flatnonzero(run_of == run)[0])
                name, parent = self._name(child), raw.decode()
                raise ValueError(f"node {name} has the parent {parent!r}, which is not in the corpus")
        return found[run_of]

    def _describe_cycle(self, parent: Ints, order: Ints) -> str:
        outside = np.ones(len(parent), dtype=bool)
        outside[order] = False
        node = int(np.flatnonzero(outside)[0])
        seen: list[int] = []
        position: dict[int, int] = {}
        while node not in position:
            position[node] = len(seen)
            seen.append(node)
            node = int(parent[node])
        cycle = [*seen[position[node] :], node]
        shown = cycle if len(cycle) <= 8 else [*cycle[:7], cycle[-1]]
        return f"the parents form a cycle of {len(cycle) - 1}: " + " -> ".join(map(self._name, shown))

    def batches(self, order: Ints) -> Iterator[pa.RecordBatch]:
        """Columns id, title, text of these arrivals, in batches of bounded rows and bytes."""
        sizes = (self._ids.lengths() + self._titles.lengths() + self._texts.lengths())[order]
        upto = np.cumsum(sizes)
        start = 0
        while start < len(order):
            before = int(upto[start - 1]) if start else 0
            stop = int(np.searchsorted(upto, before + BYTES_PER_BATCH, side="right"))
            stop = min(max(stop, start + 1), start + ROWS_PER_BATCH)
            rows = order[start:stop]
            columns = [column.take(rows) for column in (self._ids, self._titles, self._texts)]
            yield pa.RecordBatch.from_arrays(columns, schema=NODE_SCHEMA)
            start = stop


NODE_SCHEMA = pa.schema([(name, pa.large_string()) for name in ("id", "title", "text")])


def level_order(parent: Ints) -> Ints:
    """Items in level order: roots first, then their children parent by parent, and so on.

    `parent[i]` is an item or -1. Siblings keep their order. Items on or below a cycle are left out.
    """
    n = len(parent)
    counts = np.bincount(parent[parent >= 0], minlength=n)
    grouped = np.argsort(parent, kind="stable")
    num_roots = n - int(counts.sum())
    first = num_roots + np.cumsum(counts) - counts
    level = grouped[:num_roots]
    levels = [level[:0]]
    while len(level):
        levels.append(level)
        sizes = counts[level]
        # The positions first[i] .. first[i] + counts[i] of each item, one after the other.
        shift = np.repeat(first[level] - (np.cumsum(sizes) - sizes), sizes)
        level = grouped[shift + np.arange(len(shift))]
    return np.concatenate(levels)


def preorder(structure: Structure, level_starts: list[int]) -> Ints:
    """Each row's place in a depth-first walk, from the sizes of subtrees summed level by level."""
    first, n = structure.first_child, len(structure.parent)
    ends = np.append(first[1:], n)
    levels = list(zip(level_starts, level_starts[1:], strict=False))
    left = np.empty(n, dtype=np.int64)  # nodes in the subtrees left of a row, on its own level
    upto = np.zeros(1, dtype=np.int64)  # the same of the level below, with the total at its end
    for start, stop in reversed(levels):
        sizes = 1 + upto[ends[start:stop] - stop] - upto[first[start:stop] - stop]
        upto = np.concatenate(([0], np.cumsum(sizes)))
        left[start:stop] = upto[:-1]
    walk = left.copy()
    for start, stop in levels[1:]:
        above = structure.parent[start:stop]
        walk[start:stop] = walk[above] + 1 + left[start:stop] - left[first[above]]
    return walk


class Fingerprint:
    """sha256 over ids, parents, titles and texts in level order, however they are cut into batches."""

    def __init__(self, parent: Ints) -> None:
        self._parts = [hashlib.sha256() for _ in range(2 * len(NODE_SCHEMA))]
        self._parent = hashlib.sha256(np.ascontiguousarray(parent, dtype="<i8").data)

    def update(self, batch: pa.RecordBatch) -> None:
        """Take the next rows."""
        for number, column in enumerate(batch.columns):
            offsets, data = string_buffers(column)
            lengths = np.diff(np.frombuffer(offsets, dtype=np.int64)).astype("<i8")
            self._parts[2 * number].update(lengths.data)
            self._parts[2 * number + 1].update(data)

    def hexdigest(self) -> str:
        """Of everything taken so far."""
        return hashlib.sha256(b"".join(part.digest() for part in (self._parent, *self._parts))).hexdigest()


def string_buffers(column: pa.LargeStringArray) -> tuple[memoryview, memoryview]:
    """Offsets (int64, one more than rows) and UTF-8 bytes of a whole, unsliced column."""
    _, offsets, data = column.buffers()
    if column.offset or offsets is None:
        raise ValueError("a stored text column must be whole, not a slice")
    view = memoryview(offsets).cast("B").cast("q")[: len(column) + 1]
    return view, memoryview(b"") if data is None else memoryview(data).cast("B")[: view[-1]]
