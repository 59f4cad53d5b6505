"""The one training loop: steps, log, checkpoints, evaluation, resuming. Any objective, any number of ranks.

A run folder holds

    log.jsonl                one line a logged step, each step once
    eval.jsonl, best.json    evaluations; which checkpoint is the best
    checkpoints/step_*/      see `checkpoint`

and the same command continues it: the trajectory is the one that an unbroken run would have had, on a CPU bit for bit.
"""

from __future__ import annotations

import logging
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from . import checkpoint as ckpt
from .config import FitConfig
from .distributed import Ranks, enable_activation_checkpointing, make_accelerator
from .evaluation import Evaluate, Evaluations, module_modes
from .files import TEMPORARY
from .objectives.base import Objective
from .optim import Optimizer
from .resume import check_agreed, check_resumable, locked, settings
from .rng import rng_state, seed_all, set_rng_state
from .sampler import Sampler
from .signals import Interrupted, SignalFlag, StopWaiting
from .step import Stepper
from .tracking import LOG, JsonlFile, Meter, Tracker, WandbTracker

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class FitResult:
    """How a run ended.

    steps: optimiser steps in all. loss: of the last step. metrics: of the last evaluation ({} without one).
    best: {metric, mode, value, step} of the best evaluation, if `loop.best_metric` is set.
    checkpoint: folder of the last step; best_checkpoint: of the best, if there is one.
    """

    steps: int
    loss: float
    metrics: Mapping[str, float]
    best: Mapping[str, Any] | None
    checkpoint: Path
    best_checkpoint: Path | None


def fit(
    model: nn.Module,
    objective: Objective,
    *,
    config: FitConfig,
    run_dir: Path,
    evaluate: Evaluate | None = None,
    fingerprint: Mapping[str, str],
    started: Callable[[], None] | None = None,
) -> FitResult:
    """Train `model` in place to `config.loop.max_steps`, from the newest whole checkpoint in `run_dir` if there is one.

    model: parameters that require a gradient are trained; the same on every rank, and before any wrapping.
    evaluate: (model, step) -> numbers; called on rank 0 only, in eval mode, after every `eval_every` steps and at the
        end. It cannot change the trajectory, and may be called again for a step whose evaluation was cut short.
    fingerprint: what identifies data and model; a checkpoint of another fingerprint is refused.
    started: called on rank 0 before the first step, once the run folder is locked and found to fit: whatever it writes
        there belongs to this run.

    Raises Interrupted after a SIGINT or SIGTERM (saved; the same call goes on), NonFiniteError, ResumeError,
    CheckpointError, and RuntimeError for a wrong number of ranks. `run_dir` must be the same folder for all ranks.
    """
    if config.loop.best_metric and evaluate is None:
        raise ValueError(f"loop.best_metric={config.loop.best_metric!r} needs an evaluation, but none is configured")
    run_dir = Path(run_dir)
    bf16 = any(p.dtype == torch.bfloat16 for p in model.parameters())
    accelerator = make_accelerator(config.runtime, bf16_parameters=bf16)
    ranks = Ranks(accelerator)
    try:
        with _as_it_was(model), locked(run_dir, ranks), SignalFlag() as flag:
            return _Run(model, objective, config, run_dir, accelerator, ranks).go(evaluate, fingerprint, flag, started)
    finally:
        ranks.close()
        accelerator.free_memory()


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards `model` has its modes and its own forward again (a copy of it would call the wrapped one)."""
    keys = ("forward", "_original_forward", "_is_accelerate_prepared")
    before = {key: vars(model)[key] for key in keys if key in vars(model)}
    with module_modes(model):
        try:
            yield
        finally:
            for key in keys:
                vars(model).pop(key, None)
            vars(model).update(before)


class _Run:
    """One call of `fit`."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        config: FitConfig,
        run_dir: Path,
        accelerator: Accelerator,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.objective = objective
        self.config = config
        self.run_dir = run_dir
        self.root = run_dir / CHECKPOINTS
        self.accelerator = accelerator
        self.ranks = ranks
        self.saved: set[int] = set()
        self.best: dict[str, Any] | None = None
        self.metrics: dict[str, float] = {}
        self.log: JsonlFile | None = None
        self.trackers: list[Tracker] = []
        self.evaluations: Evaluations | None = None

    def go(
        self,
        evaluate: Evaluate | None,
        fingerprint: Mapping[str, str],
        flag: SignalFlag,
        started: Callable[[], None] | None,
    ) -> FitResult:
        loop = self.config.loop
        self.fingerprint = self._fingerprint(fingerprint)
        found = self._find()
        start = 0 if found is None else found.step
        if found is not None:
            ckpt.load_tensors(self.model, found.path)
        if self.config.runtime.activation_checkpointing:
            enable_activation_checkpointing(self.model)
        self.model.train()
        wrapped = self.accelerator.prepare_model(self.model)
        self.optimizer = Optimizer(self.model, self.config.optim, loop.max_steps)
        if found is not None:
            self.optimizer.load_tensors(ckpt.load_optimizer_tensors(found.path))
        self.sampler = Sampler(
            num_rows=self.objective.num_rows,
            length=self.objective.length,
            seed=loop.seed,
            batch_size=loop.batch_size,
            max_tokens=loop.max_tokens,
        )
        stepper = Stepper(
            accelerator=self.accelerator,
            ranks=self.ranks,
            model=wrapped,
            objective=self.objective,
            sampler=self.sampler,
            optimizer=self.optimizer,
        )
        self._restore_rng(found)
        try:
            self.ranks.on_main(lambda: self._open(evaluate, start, started))
            return self._loop(stepper, start, flag)
        finally:
            self._close()

    def _fingerprint(self, fingerprint: Mapping[str, str]) -> dict[str, str]:
        facts = {
            **{str(key): str(value) for key, value in fingerprint.items()},
            **settings(self.config),
            "objective.num_rows": str(self.objective.num_rows),
            "objective.weights": repr(dict(sorted(self.objective.weights.items()))),
        }
        check_agreed(facts, self.ranks)
        return facts

    def _find(self) -> ckpt.Checkpoint | None:
        """The checkpoint to go on from, chosen and checked by rank 0, the same on every rank."""

        def choose() -> tuple[str, int, dict[str, Any]] | None:
            found = ckpt.newest_good(self.root)
            if found is not None:
                check_resumable(found.state["fingerprint"], self.fingerprint, step=found.step, config=self.config)
            ckpt.tidy(self.root, 0 if found is None else found.step)
            return None if found is None else (str(found.path), found.step, found.state)

        answer = self.ranks.on_main(choose)
        if answer is None:
            return None
        path, step, state = answer
        return ckpt.Checkpoint(Path(path), step, state)

    def _restore_rng(self, found: ckpt.Checkpoint | None) -> None:
        if found is None:
            seed_all(self.config.loop.seed, self.ranks.rank)
            return
        states = found.state["rng"]
        if len(states) != self.ranks.size:
            logger.warning(
                "%s was saved by %d rank(s), now there are %d: dropout differs",
                found.path,
                len(states),
                self.ranks.size,
            )
        if self.ranks.rank < len(states):
            set_rng_state(states[self.ranks.rank])
        else:
            seed_all(self.config.loop.seed, self.ranks.rank, found.step)

    def _open(self, evaluate: Evaluate | None, start: int, started: Callable[[], None] | None) -> None:
        """Rank 0 opens its files, and drops from them what a killed run wrote after its last checkpoint."""
        if started is not None:
            started()
        for leftover in self.run_dir.glob(f"*{TEMPORARY}"):
            leftover.unlink()
        self.log = JsonlFile(self.run_dir / LOG, start)
        self.trackers.append(self.log)
        if self.config.tracker.wandb:
            self.trackers.append(WandbTracker(self.config.tracker, self.run_dir, self.fingerprint))
        if evaluate is not None:
            self.evaluations = Evaluations(evaluate, self.config.loop, self.run_dir, start)
            self.best = self.evaluations.best({step for step, _ in ckpt.checkpoints(self.root)})
            self.evaluations.write_best(self.best)

    def _close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        if self.evaluations is not None:
            self.evaluations.close()

    def _loop(self, stepper: Stepper, start: int, flag: SignalFlag) -> FitResult:
        loop = self.config.loop
        loss = self.log.lines[-1]["loss"] if self.log is not None and self.log.lines else float("nan")
        meter = Meter(self.model, self.accelerator, self.sampler)
        bar = tqdm(
            total=loop.max_steps, initial=start, disable=not self.ranks.is_main, desc=self.run_dir.name, unit="step"
        )
        with bar:
            if start:
                self.saved.add(start)
                self._evaluate(start, flag)
            for done in range(start + 1, loop.max_steps + 1):
                began = time.perf_counter()
                report = stepper(done - 1, lambda: flag.signum)
                meter.add(report, time.perf_counter() - began)
                loss = report.loss
                last = done == loop.max_steps
                if self.ranks.is_main and (last or _due(done, loop.log_every)):
                    self._write(done, meter.values(done, report))
                bar.update()
                bar.set_postfix_str(f"loss {report.loss:.4f}, {meter.tokens_per_second:,.0f} tokens/s", refresh=False)
                if last or report.signum or _due(done, loop.save_every):
                    self._save(done)
                if report.signum:
                    raise self._interrupted(done, report.signum)
                self._evaluate(done, flag)
        signum = max(self.ranks.gather(int(flag.signum)))
        if signum:
            raise self._interrupted(loop.max_steps, signum)
        return self._result(loss)

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(step, values)

    def _save(self, step: int) -> None:
        """Save all of the run after `step` steps, once; then delete what need not stay."""
        if step in self.saved:
            return
        states = self.ranks.gather(rng_state())

        def write() -> None:
            if self.log is not None:
                self.log.sync()
            ckpt.save_checkpoint(self.root, step, tensors=self._tensors(), state=self._state(step, states))
            ckpt.prune(self.root, self.config.loop.keep_checkpoints, self._protected())

        self.ranks.on_main(write)
        self.saved.add(step)

    def _protected(self) -> set[int]:
        return set() if self.best is None else {int(self.best["step"])}

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        tensors: dict[str, dict[str, Tensor]] = {
            ckpt.PARAMETERS: dict(self.optimizer.parameters),
            ckpt.OPTIMIZER: self.optimizer.tensors(),
        }
        buffers = ckpt.persistent_buffers(self.model)
        return tensors | {ckpt.BUFFERS: buffers} if buffers else tensors

    def _state(self, step: int, rng: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "format": ckpt.FORMAT,
            "step": step,
            "sampler": {"next_row": step * self.config.loop.batch_size, "epoch": self.sampler.epoch(step)},
            "fingerprint": self.fingerprint,
            "parameters": {n: [str(p.dtype), list(p.shape)] for n, p in self.optimizer.parameters.items()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
            | {name: version(name) for name in ("accelerate", "transformers", "safetensors")},
            "world_size": self.ranks.size,
            "rng": rng,
        }

    def _evaluate(self, step: int, flag: SignalFlag) -> None:
        """Evaluate if it is due after `step` steps and not yet done; keep the checkpoint if it is the best."""
        loop = self.config.loop
        if step != loop.max_steps and not _due(step, loop.eval_every):
            return

        def work() -> dict[str, Any]:
            if self.evaluations is None:
                return {"metrics": {}, "known": True}
            known = self.evaluations.metrics_at(step)
            if known is not None:
                return {"metrics": known, "known": True}
            began = time.perf_counter()
            try:
                with flag.raising():
                    metrics = self.evaluations.run(self.model, step)
            except StopWaiting:
                return {"signum": flag.signum}
            return {
                "metrics": metrics,
                "known": False,
                "is_best": self.evaluations.is_best(metrics, self.best),
                "seconds": time.perf_counter() - began,
            }

        answer = self.ranks.on_main(work)
        if "signum" in answer:
            self._save(step)
            raise self._interrupted(step, answer["signum"])
        self.metrics = answer["metrics"]
        if answer["known"]:
            return
        if answer["is_best"]:
            # The checkpoint comes first, so that `best.json` never points to one that is not there.
            self._save(step)
        self.ranks.on_main(lambda: self._record(step, answer))

    def _record(self, step: int, answer: Mapping[str, Any]) -> None:
        assert self.evaluations is not None
        self.evaluations.record(step, answer["metrics"], answer["seconds"])
        for tracker in self.trackers[1:]:
            tracker.log(step, {f"eval/{name}": value for name, value in answer["metrics"].items()})
        if answer["is_best"]:
            name = self.config.loop.best_metric
            self.best = {
                "metric": name,
                "mode": self.config.loop.best_mode,
                "value": answer["metrics"][name],
                "step": step,
            }
            self.evaluations.write_best(self.best)
            ckpt.prune(self.root, self.config.loop.keep_checkpoints, self._protected())

    def _interrupted(self, step: int, signum: int) -> Interrupted:
        return Interrupted(
            f"stopped by {signal.Signals(signum).name} after step {step} of {self.config.loop.max_steps}; saved in "
            f"{ckpt.step_path(self.root, step)}. Give the same command to go on",
            signum,
        )

    def _result(self, loss: float) -> FitResult:
        step = self.config.loop.max_steps
        loss, best = self.ranks.on_main(lambda: (loss, self.best))
        return FitResult(
            steps=step,
            loss=loss,
            metrics=self.metrics,
            best=best,
            checkpoint=ckpt.step_path(self.root, step),
            best_checkpoint=None if best is None else ckpt.step_path(self.root, best["step"]),
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
