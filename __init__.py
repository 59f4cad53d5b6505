"""Train and run retrievers that decide, recurse and reason.

`import retrail` costs milliseconds: each public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .data_prep.corpus import Corpus
    from .data_prep.hits import Cost, Hits
    from .eval.metrics import evaluate
    from .models.bm25 import BM25
    from .models.decision.navigate import Navigator
    from .models.load import load
    from .models.protocols import DecisionScorer, Retriever

__version__ = "0.1.0"

__all__ = [
    "BM25",
    "Corpus",
    "Cost",
    "DecisionScorer",
    "Hits",
    "Navigator",
    "Retriever",
    "__version__",
    "evaluate",
    "load",
]

_HOMES = {
    "BM25": ".models.bm25",
    "Corpus": ".data_prep.corpus",
    "Cost": ".data_prep.hits",
    "DecisionScorer": ".models.protocols",
    "Hits": ".data_prep.hits",
    "Navigator": ".models.decision.navigate",
    "Retriever": ".models.protocols",
    "evaluate": ".eval.metrics",
    "load": ".models.load",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
