"""What `train` leaves in a run folder for `export` and `sweep`: the resolved settings, and the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ..train.files import write_json
from .config import TrainRun

SETTINGS = "config.json"
RESULT = "result.json"


def start_run(run: TrainRun, folder: Path) -> None:
    """Write the resolved settings of a run, and take away the result of an earlier, shorter one."""
    write_json(folder / SETTINGS, asdict(run))
    (folder / RESULT).unlink(missing_ok=True)


def load_settings(folder: Path) -> TrainRun:
    """The settings that a run was started with.

    Raises:
        FileNotFoundError: `folder` is no run.
        ValueError: settings of another version; names the key.
    """
    file = folder / SETTINGS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not a run folder: it holds no {SETTINGS}; `retrail train` makes one")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        merged = OmegaConf.merge(OmegaConf.structured(TrainRun), values)
        return cast(TrainRun, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def save_result(folder: Path, metrics: Mapping[str, float], **more: object) -> None:
    """Write what came out of a run; its presence says that the run is done."""
    write_json(folder / RESULT, {"metrics": dict(metrics), **more})
