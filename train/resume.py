"""Whether a run folder may be continued, and by whom."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from .config import FitConfig
from .distributed import Ranks
from .optim import lr_multiplier

logger = logging.getLogger(__name__)

LOCK = ".lock"
# Settings that may change when a run continues. All others, the data and the model may not. `loop.max_steps` may if the
# steps already taken would have had the same learning rates. max_tokens, precision and ranks change rounding, not rows.
FREE_SETTINGS = (
    "loop.log_every",
    "loop.eval_every",
    "loop.save_every",
    "loop.keep_checkpoints",
    "loop.best_metric",
    "loop.best_mode",
    "loop.max_tokens",
    "loop.max_steps",
)


class ResumeError(RuntimeError):
    """A run folder that belongs to other data, another model or other settings."""


def settings(config: FitConfig) -> dict[str, str]:
    """The settings that decide a trajectory, flat: {"optim.lr": "0.0002", ...}. `runtime` and `tracker` do not."""
    return {
        f"{group}.{key}": repr(value)
        for group in ("optim", "loop")
        for key, value in asdict(getattr(config, group)).items()
    }


def check_resumable(saved: Mapping[str, str], now: Mapping[str, str], *, step: int, config: FitConfig) -> None:
    """Raise ResumeError that names the key and both values if a run may not go on after `step` steps.

    saved, now: fingerprints. Settings of `FREE_SETTINGS` may differ; what changes rounding is noted in a warning.
    """
    for key in sorted(set(saved) | set(now)):
        before, after = saved.get(key, "(absent)"), now.get(key, "(absent)")
        if before == after:
            continue
        if key not in FREE_SETTINGS:
            raise ResumeError(
                f"the run folder was started with {key}={before}, now it is {after}. Give another name (run folder) "
                f"to start a new run, or set {key} back to go on"
            )
        if key == "loop.max_tokens":
            logger.warning(
                "%s was %s, now %s: the same rows in each step, but sums round differently", key, before, after
            )
    old_max = int(saved["loop.max_steps"])
    new_max = config.loop.max_steps
    if new_max < step:
        raise ResumeError(
            f"loop.max_steps={new_max}, but the run folder has {step} steps already; it was started with {old_max}"
        )
    if old_max != new_max and any(
        lr_multiplier(s, config.optim, old_max) != lr_multiplier(s, config.optim, new_max) for s in range(step)
    ):
        raise ResumeError(
            f"the run folder was started with loop.max_steps={old_max}, now it is {new_max}: with optim.schedule="
            f"{config.optim.schedule} the {step} steps already taken would have had other learning rates. Set it back, "
            "or start a new run (with optim.schedule=constant and optim.warmup_ratio=0 it may change)"
        )


def check_agreed(own: Mapping[str, str], ranks: Ranks) -> None:
    """Raise RuntimeError on every rank that names the key and both values unless all have the same fingerprint."""
    for rank, other in enumerate(ranks.gather(dict(own))):
        for key in sorted(own.keys() | other.keys()):
            if own.get(key) != other.get(key):
                raise RuntimeError(
                    f"rank {rank} has {key}={other.get(key)}, but rank {ranks.rank} has {own.get(key)}: ranks must "
                    "train the same model on the same rows; give all of them the same files and versions"
                )


@contextmanager
def locked(run_dir: Path, ranks: Ranks) -> Iterator[None]:
    """Hold the run folder, so that a second process is refused; the system lets go when the process dies."""
    with ExitStack() as stack:

        def take() -> None:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((run_dir / LOCK).open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RuntimeError(
                    f"{run_dir}: another process is training into this folder; give another name"
                ) from error

        ranks.on_main(take)
        yield
