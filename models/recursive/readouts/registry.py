"""Readouts by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ...config import check_choice
from .base import Readout
from .fusion import RRF, Borda, PostOrderRRF
from .global_readout import CombMNZ, GlobalReadout, MaxOverStates, combsum, recovery_view_readout
from .model_based import Assembly, RootInterpolation
from .realised import (
    ChainOrder,
    PathProduct,
    RootReadout,
    SelectedSet,
    StateReadout,
    probability_chain,
    sequence_sum,
    terminal,
)
from .views import ZAgreement, minmax_combmnz, path_recovery_fusion, recovery_fusion


def _rrf_level(k: int = 60) -> RRF:
    return RRF(k, level_balanced=True)


READOUTS: Mapping[str, Any] = {
    "global": GlobalReadout,
    "combsum": combsum,
    "root": RootReadout,
    "path_product": PathProduct,
    "sequence_sum": sequence_sum,
    "probability_chain": probability_chain,
    "chain_order": ChainOrder,
    "selected_set": SelectedSet,
    "terminal": terminal,
    "state": StateReadout,
    "rrf": RRF,
    "rrf_level": _rrf_level,
    "rrf_postorder": PostOrderRRF,
    "borda": Borda,
    "combmnz": CombMNZ,
    "max": MaxOverStates,
    "root_interpolation": RootInterpolation,
    "assembly": Assembly,
    "z_agreement": ZAgreement,
    "recovery": recovery_view_readout,
    "recovery_fusion": recovery_fusion,
    "path_recovery_fusion": path_recovery_fusion,
    "minmax_combmnz": minmax_combmnz,
}
# Options that are readouts themselves, and may be named.
_NESTED = {"base": False, "parts": True}


def make_readout(readout: str | Readout, options: Mapping[str, Any] | None = None) -> Readout:
    """A readout by its name, with options, or the readout itself.

    Raises:
        ValueError: an unknown name or option; lists those that exist.
    """
    if not isinstance(readout, str):
        if options:
            raise ValueError(f"options {dict(options)} belong to a readout that is named, not to {readout}")
        return readout
    check_choice("readout", readout, tuple(READOUTS))
    make, given = READOUTS[readout], dict(options or {})
    known = list(inspect.signature(make).parameters)
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"readout={readout} has no option {name!r}; it has: {', '.join(known) or 'none'}")
        if name in _NESTED:
            given[name] = tuple(map(make_readout, value)) if _NESTED[name] else make_readout(value)
        elif isinstance(value, list):
            given[name] = tuple(value)
    missing = [n for n, p in inspect.signature(make).parameters.items() if p.default is p.empty and n not in given]
    if missing:
        raise ValueError(f"readout={readout} also needs: {', '.join(missing)}")
    made: Readout = make(**given)
    return made
