"""Readouts by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import make_named
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
    given = {name: _opened(name, value) for name, value in (options or {}).items()}
    made: Readout = make_named("readout", READOUTS, readout, given)
    return made


def _opened(name: str, value: Any) -> Any:
    if name in _NESTED:
        return tuple(map(make_readout, value)) if _NESTED[name] else make_readout(value)
    return tuple(value) if isinstance(value, list) else value
