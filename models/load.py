"""Open an exported folder: read `retrieval.json`, refuse what does not match, build the loop of its family."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..data_prep.corpus import Corpus
from .config import DecisionConfig, ModelConfig, NavigateConfig
from .exports import RETRIEVAL, ExportError, check_weights, read_export, refuse_mismatch, section, settings

if TYPE_CHECKING:
    from .decision.navigate import Navigator
    from .decision.scorer import LocalScorer
    from .decision.static import StaticSlates
    from .protocols import Retriever

# What the settings of a slate were before there was a choice.
_CAME_LATER = {"query_cut": "end"}


def load(
    path: str | Path,
    corpus: Corpus | str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    navigate: NavigateConfig | None = None,
    join: Retriever | None = None,
    static: str | Path | None = None,
    trunk_cache_bytes: int = 0,
) -> Navigator:
    """A retriever over `corpus` from an exported folder.

    corpus: a `Corpus`, or a folder of one, or a prepared folder that holds one.
    navigate: budgets instead of the exported ones.
    join: another retriever, whose best join the last level.
    static: a folder of `retrail static`, whose slates are then read no more.
    trunk_cache_bytes: memory for candidates that come back in later searches (see `LocalScorer`).

    Raises:
        FileNotFoundError: a path that is not there.
        ExportError: the folder does not match this version's prompt, or its own tokenizer.
        StaticError: the static slates are damaged, or of another model or corpus.
    """
    from .decision.navigate import Navigator

    export = read_export(path)
    opened = corpus if isinstance(corpus, Corpus) else open_corpus(corpus)
    store = None
    if static is not None:  # before the weights, which take long to load
        from .decision.static import StaticSlates

        store = StaticSlates.open(static)
        store.check_corpus(opened)
    scorer = load_scorer(path, device=device, dtype=dtype, static=store, trunk_cache_bytes=trunk_cache_bytes)
    return Navigator(scorer, opened, navigate or export.navigate, join=join)


def open_corpus(path: str | Path) -> Corpus:
    """The corpus of a corpus folder or of a prepared folder."""
    inside = Path(path) / "corpus"
    return Corpus.open(inside if inside.is_dir() else path)


def load_scorer(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    static: StaticSlates | None = None,
    trunk_cache_bytes: int = 0,
) -> LocalScorer:
    """The decision scorer of an exported folder, to put into any loop.

    Raises:
        FileNotFoundError, ExportError, StaticError: as `load`.
    """
    from .backbone import load_backbone, pick_device
    from .decision.build import HEAD, contract, load_head, open_layout, wrap_decision
    from .decision.scorer import LocalScorer

    export = read_export(path)
    file = export.path / RETRIEVAL
    stored = section(export.manifest, "contract", file)
    config = settings(DecisionConfig, stored, "decision", file)
    check_weights(export.path)
    place = pick_device(device)
    try:
        backbone, tokenizer = load_backbone(ModelConfig(path=str(export.path.resolve()), dtype=dtype), place)
        layout = open_layout(tokenizer, config, backbone)
    except (OSError, ValueError) as error:
        raise ExportError(f"{export.path}: what it holds cannot be opened: {error}") from error
    refuse_mismatch({**stored, "decision": _CAME_LATER | stored["decision"]}, contract(layout), file)
    network = wrap_decision(backbone.requires_grad_(False), layout)
    if network.head is not None:
        file = export.path / HEAD
        if not file.is_file():
            raise ExportError(f"{file}: missing, but decision.head is pointer; export the run again")
        try:
            load_head(network.head, file)
        except ValueError as error:
            raise ExportError(str(error)) from error
    return LocalScorer(network, layout, static=static, trunk_cache_bytes=trunk_cache_bytes)
