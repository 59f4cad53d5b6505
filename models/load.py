"""Open an exported folder: read `retrieval.json`, refuse what does not match, build the loop of its family."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..data_prep.corpus import Corpus
from .config import DecisionConfig, EncoderConfig, ModelConfig, NavigateConfig, RecurseConfig
from .exports import RETRIEVAL, ExportError, check_weights, read_export, refuse_mismatch, section, settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .decision.navigate import Navigator
    from .decision.scorer import LocalScorer
    from .decision.static import StaticSlates
    from .protocols import Retriever
    from .recursive.encoder import LocalEncoder
    from .recursive.retriever import RecursiveRetriever

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
    recurse: RecurseConfig | None = None,
    index: str | Path | None = None,
) -> Navigator | RecursiveRetriever:
    """A retriever over `corpus` from an exported folder: what its family is, is what comes back.

    corpus: a `Corpus`, or a folder of one, or a prepared folder that holds one.

    A decision model walks:

    navigate: budgets instead of the exported ones.
    join: another retriever, whose best join the last level.
    static: a folder of `retrail static`, whose slates are then read no more.
    trunk_cache_bytes: memory for candidates that come back in later searches (see `LocalScorer`).

    A state encoder searches an index:

    recurse: how, instead of as it was exported.
    index: a folder that keeps the vectors of the documents, or is to keep them (None: they are made anew, in memory).

    Raises:
        FileNotFoundError: a path that is not there.
        ExportError: the folder does not match this version's prompt, or its own tokenizer; or options of one family are
            given for a retriever of the other.
        IndexMismatchError: the index is of another corpus or encoder.
        StaticError: the static slates are damaged, or of another model or corpus.
    """
    from .decision.navigate import Navigator

    export = read_export(path)
    opened = corpus if isinstance(corpus, Corpus) else open_corpus(corpus)
    own = {"navigate": navigate, "join": join, "static": static, "trunk_cache_bytes": trunk_cache_bytes or None}
    other = {"recurse": recurse, "index": index}
    _refuse_options(export.path, export.family, other if export.family == "decision" else own)
    if export.family == "recursive":
        return _load_recursive(path, opened, recurse or export.recurse, index, device, dtype)
    store = None
    if static is not None:  # before the weights, which take long to load
        from .decision.static import StaticSlates

        store = StaticSlates.open(static)
        store.check_corpus(opened)
    scorer = load_scorer(path, device=device, dtype=dtype, static=store, trunk_cache_bytes=trunk_cache_bytes)
    return Navigator(scorer, opened, navigate or export.navigate, join=join)


def _refuse_options(folder: Path, family: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ExportError(f"{folder} holds a retriever of the family {family}, which has no {name}; leave it out")


def _load_recursive(
    path: str | Path, corpus: Corpus, config: RecurseConfig, index: str | Path | None, device: str, dtype: str
) -> RecursiveRetriever:
    from .recursive.retriever import RecursiveRetriever

    retriever = RecursiveRetriever.of(load_encoder(path, device=device, dtype=dtype), config)
    retriever.build_index(corpus, folder=index, dtype=config.index_dtype, progress=True)
    return retriever


def load_encoder(path: str | Path, *, device: str = "auto", dtype: str = "auto") -> LocalEncoder:
    """The state encoder of an exported folder, to put into any search.

    Raises:
        FileNotFoundError: there is no export.
        ExportError: it is of another family, or its contract is not that of this version and its own tokenizer.
    """
    from .recursive.encoder import LocalEncoder
    from .recursive.prompts import PromptConfig

    export = read_export(path)
    export.need("recursive")
    file = export.path / RETRIEVAL
    stored = section(export.manifest, "contract", file)
    config = settings(EncoderConfig, export.manifest, "encoder", file)
    check_weights(export.path)
    try:
        prompts = PromptConfig.from_dict(section(export.manifest, "prompts", file), str(file))
        model = ModelConfig(path=str(export.path.resolve()), dtype=dtype)
        encoder = LocalEncoder.open(model, config, prompts, device=device)
    except (OSError, ValueError) as error:
        raise ExportError(f"{export.path}: what it holds cannot be opened: {error}") from error
    now = {key: value for key, value in encoder.contract.items() if key in stored and key != "dtype"}
    refuse_mismatch({key: value for key, value in stored.items() if key != "dtype"}, now, file)
    encoder.source = str(path)
    return encoder


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
    export.need("decision")
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
