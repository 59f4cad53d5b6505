"""Traversals in a file, so that any readout can read them later: one safetensors file with a JSON head, no pickle.

The numbers of all states and proposals lie in flat arrays; what is ragged has an array of counts beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...data_prep.files import new_file
from ...data_prep.hits import Cost
from ..exports import differences
from .index import IndexMismatchError
from .traversal import Proposal, StateRecord, Traversal

FORMAT, FORMAT_VERSION = "retrail-traversals", 1

QueryId = str | int

_SCALARS = ("level", "parent", "path_score", "low", "high", "search_seconds")
_PROPOSAL_INTS = ("document", "parent", "level")
_PROPOSAL_FLOATS = ("score", "cum", "path_sum", "logp")


def save_traversals(path: str | Path, traversals: Mapping[QueryId, Traversal], *, index: Mapping[str, object]) -> None:
    """Write them in one move. `index`: what the rows are rows of (corpus fingerprint, contract ...), plain JSON.

    Raises:
        ValueError: ids of queries mix `str` and `int`.
    """
    from safetensors.numpy import save

    if len({type(query) for query in traversals}) > 1:
        raise ValueError("ids of queries must all be str or all int")
    states = [s for t in traversals.values() for group in (t.states, *t.views.values()) for s in group]
    proposals = [p for t in traversals.values() for p in t.proposals]
    arrays = {f"state.{name}": array for name, array in _state_arrays(states).items()}
    arrays |= {f"proposal.{name}": array for name, array in _proposal_arrays(proposals).items()}
    head = {
        "format": FORMAT, "version": FORMAT_VERSION, "index": index,
        "traversals": [_facts(query, traversal) for query, traversal in traversals.items()],
        "roles": [s.role for s in states], "notes": [s.notes for s in states],
        "costs": [asdict(s.cost) for s in states],
    }  # fmt: skip
    body = save(arrays, metadata={"retrail": json.dumps(head, allow_nan=False)})
    with new_file(path) as out:
        out.write(body)


def read_traversals(path: str | Path, *, index: Mapping[str, object] | None = None) -> dict[QueryId, Traversal]:
    """The traversals of a file; `index`: what they have to be rows of (None: anything).

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged, or holds something else.
        IndexMismatchError: they were made with another index; names both values.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there are no traversals; save them with a search first")
    try:
        with safe_open(path, framework="numpy") as file:
            head = json.loads((file.metadata() or {}).get("retrail", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: damaged or cut off ({error}); search again") from error
    if (head.get("format"), head.get("version")) != (FORMAT, FORMAT_VERSION):
        raise ValueError(f"{path}: no {FORMAT} of version {FORMAT_VERSION}")
    if index is not None:
        for key, before, here in differences(head["index"], json.loads(json.dumps(index))):
            raise IndexMismatchError(
                f"{path}: {key} of the index was {before!r} when it was searched and is {here!r} here; search again"
            )
    return _assemble(head, arrays)


def _facts(query: QueryId, traversal: Traversal) -> dict[str, Any]:
    plain = ("query", "instruction", "search", "candidate_k", "temperature", "excluded", "realised", "notes")
    facts = {name: getattr(traversal, name) for name in plain}
    views = {name: len(states) for name, states in traversal.views.items()}
    return facts | {"id": query, "states": len(traversal.states), "proposals": len(traversal.proposals), "views": views}


def _state_arrays(states: Sequence[StateRecord]) -> dict[str, np.ndarray]:
    number = {"parent": -1.0, "low": np.nan, "high": np.nan}
    arrays = {
        name: np.array([number[name] if getattr(s, name) is None else getattr(s, name) for s in states], np.float64)
        for name in _SCALARS
    }
    arrays |= _ragged("observed", [np.array(s.observed, dtype=np.int64) for s in states], np.int64)
    arrays |= _ragged("candidates", [s.candidates_K for s in states], np.int64)
    arrays |= _ragged("scores", [s.scores_K for s in states], np.float32)
    vectors = [s.vector_D for s in states]
    return arrays | {"vectors": np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)}


def _proposal_arrays(proposals: Sequence[Proposal]) -> dict[str, np.ndarray]:
    arrays = {name: np.array([getattr(p, name) for p in proposals], np.int64) for name in _PROPOSAL_INTS}
    arrays |= {name: np.array([getattr(p, name) for p in proposals], np.float64) for name in _PROPOSAL_FLOATS}
    arrays["kept"] = np.array([p.kept for p in proposals], np.uint8)
    return arrays | _ragged("path", [np.array(p.path, dtype=np.int64) for p in proposals], np.int64)


def _ragged(name: str, rows: Sequence[np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    flat = np.concatenate([np.asarray(row, dtype) for row in rows]) if rows else np.zeros(0, dtype)
    return {name: flat, f"{name}_counts": np.array([len(row) for row in rows], np.int64)}


def _rows(arrays: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    return np.split(arrays[name], np.cumsum(arrays[f"{name}_counts"])[:-1]) if len(arrays[f"{name}_counts"]) else []


def _assemble(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[QueryId, Traversal]:
    states = iter(_states(head, arrays))
    proposals = iter(_proposals(arrays))
    found: dict[QueryId, Traversal] = {}
    for facts in head["traversals"]:
        own = tuple(next(states) for _ in range(facts["states"]))
        views = {name: tuple(next(states) for _ in range(count)) for name, count in facts["views"].items()}
        found[facts["id"]] = Traversal(
            query=facts["query"],
            instruction=facts["instruction"],
            search=facts["search"],
            candidate_k=facts["candidate_k"],
            temperature=facts["temperature"],
            states=own,
            proposals=tuple(next(proposals) for _ in range(facts["proposals"])),
            excluded=tuple(facts["excluded"]),
            realised=facts["realised"],
            views=views,
            notes=tuple(facts["notes"]),
        )
    return found


def _states(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterable[StateRecord]:
    own = {name.removeprefix("state."): array for name, array in arrays.items() if name.startswith("state.")}
    observed, candidates, scores = (_rows(own, name) for name in ("observed", "candidates", "scores"))
    for n, role in enumerate(head["roles"]):
        low, high = float(own["low"][n]), float(own["high"][n])
        yield StateRecord(
            role=role,
            level=int(own["level"][n]),
            parent=int(own["parent"][n]) if own["parent"][n] >= 0 else None,
            observed=tuple(observed[n].tolist()),
            path_score=float(own["path_score"][n]),
            candidates_K=candidates[n],
            scores_K=scores[n],
            vector_D=own["vectors"][n],
            low=None if np.isnan(low) else low,
            high=None if np.isnan(high) else high,
            cost=Cost(**head["costs"][n]),
            search_seconds=float(own["search_seconds"][n]),
            notes=tuple(head["notes"][n]),
        )


def _proposals(arrays: Mapping[str, np.ndarray]) -> Iterable[Proposal]:
    own = {name.removeprefix("proposal."): array for name, array in arrays.items() if name.startswith("proposal.")}
    paths = _rows(own, "path")
    for n in range(len(own["document"])):
        numbers = {name: int(own[name][n]) for name in _PROPOSAL_INTS}
        values = {name: float(own[name][n]) for name in _PROPOSAL_FLOATS}
        yield Proposal(**numbers, **values, path=tuple(paths[n].tolist()), kept=bool(own["kept"][n]))  # type: ignore[arg-type]
