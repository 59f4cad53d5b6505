"""One optimiser step: the same loss and the same gradient for any cut into microbatches and ranks.

With N_t the count of term t over all rows of the step (every microbatch, every rank), the loss of the step is

    L = sum over t of  w_t * (sum over rows of l_t) / N_t

so each microbatch contributes its *summed* terms times w_t / N_t, and gradients add up. DDP averages over the W ranks
where L wants the sum, so each contribution is multiplied by W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from .distributed import Ranks
from .objectives.base import Batch, ContrastiveObjective, LossParts, Objective, PaddedBatch
from .optim import Optimizer
from .sampler import Sampler
from .signals import SIGNALS

MAX_NAMES = 16


class NonFiniteError(RuntimeError):
    """A loss or gradient that is NaN or infinite; raised on every rank, before the optimiser stepped."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Numbers of one step, over all ranks; the same on each."""

    loss: float
    terms: Mapping[str, float]
    logs: Mapping[str, float]
    lr: float
    grad_norm: float
    tokens: int
    padded_tokens: int
    signum: int


@dataclass(frozen=True, slots=True)
class _Reduced:
    """Sums over ranks."""

    bad_loss: bool
    bad_norm: bool
    terms: Mapping[str, float]
    logs: Mapping[str, float]
    tokens: int
    padded_tokens: int
    signum: int


class _Tally:
    """What one rank adds up over the microbatches of a step."""

    def __init__(self, weights: Mapping[str, float], device: torch.device) -> None:
        self.losses: list[Tensor] = []
        self.terms = {name: torch.zeros((), dtype=torch.float64, device=device) for name in weights}
        self.logs: dict[str, Tensor] = {}

    def add(self, loss: Tensor, parts: LossParts) -> None:
        self.losses.append(loss.detach())
        for name in self.terms:
            self.terms[name] += parts.sums[name].detach()
        for name, value in parts.logs.items():
            value = value.detach().double()
            self.logs[name] = self.logs[name] + value if name in self.logs else value


class Stepper:
    """Runs steps: forward and backward, check, clip, update.

    model: as prepared by Accelerate. optimizer: over the same parameters.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        ranks: Ranks,
        model: nn.Module,
        objective: Objective,
        sampler: Sampler,
        optimizer: Optimizer,
    ) -> None:
        self._accelerator = accelerator
        self._ranks = ranks
        self._model = model
        self._objective = objective
        self._sampler = sampler
        self._optimizer = optimizer
        self._weights = dict(objective.weights)
        # Names of what is reduced; ranks agree on them in the first step, as an empty batch may know fewer.
        self._count_names: tuple[str, ...] | None = None
        self._log_names: tuple[str, ...] | None = None

    def __call__(self, step: int, signum: Callable[[], int]) -> StepReport:
        """Take step `step` (counted from 0). `signum` tells, when it is done, this rank's signal so far (0: none).

        Raises NonFiniteError on every rank, with the parameters as they were, if a loss or gradient of any rank is not
        finite.
        """
        plan = self._sampler.plan(step, self._ranks.size)[self._ranks.rank]
        batches = [self._objective.collate(rows) for rows in plan]
        counts = self._global_counts(batches)
        tally = _Tally(self._weights, self._accelerator.device)
        if isinstance(self._objective, ContrastiveObjective):
            self._contrast(self._objective, batches, counts, tally)
        else:
            self._accumulate(batches, counts, tally)
        norm = torch.nn.utils.get_total_norm(self._optimizer.gradients())
        reduced = self._reduce(batches, tally, norm, signum())
        if reduced.bad_loss or reduced.bad_norm:
            self._stop(step, batches, tally.losses, bad_loss=reduced.bad_loss)
        parameters = self._optimizer.parameters.values()
        torch.nn.utils.clip_grads_with_norm_(parameters, self._optimizer.config.max_grad_norm, norm)
        lr = self._optimizer.step(step)
        terms = {name: total / counts[name] if counts[name] else 0.0 for name, total in reduced.terms.items()}
        return StepReport(
            loss=sum(weight * terms[name] for name, weight in self._weights.items()),
            terms=terms,
            logs={name: total / (counts.get(name) or 1.0) for name, total in reduced.logs.items()},
            lr=lr,
            grad_norm=float(norm),
            tokens=reduced.tokens,
            padded_tokens=reduced.padded_tokens,
            signum=reduced.signum,
        )

    def _accumulate(self, batches: Sequence[Batch], counts: Mapping[str, float], tally: _Tally) -> None:
        """Each microbatch by itself."""
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                parts = self._objective.loss(self._model, send_to_device(batch, self._accelerator.device))
                loss = self._scaled(parts, counts, empty=not batch.names)
                self._accelerator.backward(loss)
            tally.add(loss, parts)

    def _contrast(
        self,
        objective: ContrastiveObjective,
        batches: Sequence[Batch],
        counts: Mapping[str, float],
        tally: _Tally,
    ) -> None:
        """All microbatches of all ranks against each other (GradCache, arXiv 2101.06983).

        Vectors first, without gradients; then the loss and its gradient in every vector; then each microbatch again,
        with that gradient. A step of one microbatch keeps its graph and needs no second pass. The sum over ranks of
        what each rank's loss says of a vector is its gradient, so negatives of other ranks are trained too.
        """
        moved = [send_to_device(batch, self._accelerator.device) for batch in batches]
        alone = len(batches) == 1
        noise = []
        vectors = []
        for batch in moved:
            noise.append(_noise(self._accelerator.device))
            with nullcontext() if alone else torch.no_grad():
                vectors.append(objective.represent(self._model, batch))
        own = torch.cat([v.detach() for v in vectors])
        together, start = self._ranks.gather_rows(own)
        leaf = together.clone().requires_grad_()
        facts = self._ranks.gather([objective.facts(batch) for batch in batches])
        parts = objective.contrast(leaf, facts, self._ranks.rank, batches)
        loss = self._scaled(parts, counts, empty=False)
        loss.backward()
        tally.add(loss, parts)
        # A rank whose rows nothing was compared with has no gradient.
        gradient = self._ranks.add_up(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        gradient = gradient[start : start + len(own)]
        place = 0
        for i, batch in enumerate(moved):
            last = i == len(batches) - 1
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                if not alone:
                    _set_noise(noise[i], self._accelerator.device)
                    vectors[i] = objective.represent(self._model, batch)
                part = gradient[place : place + len(vectors[i])]
                self._accelerator.backward((vectors[i] * part).sum() + (0.0 if batch.names else self._touch()))
            place += len(part)

    def _touch(self) -> Tensor:
        """Zero, made of one element of every parameter: DDP waits in backward for the gradient of each."""
        return torch.stack([0.0 * p.reshape(-1)[0].float() for p in self._optimizer.parameters.values()]).sum()

    def _global_counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count of each term over all rows of the step."""
        own: dict[str, float] = dict.fromkeys(self._weights, 0.0)
        for batch in batches:
            for name, count in batch.counts.items():
                own[name] = own.get(name, 0.0) + float(count)
        if self._count_names is None:
            self._count_names = self._ranks.union(own)
        unknown = set(own) - set(self._count_names)
        if unknown:
            raise ValueError(
                f"counts {sorted(unknown)} were not in the first step's batches; give every batch the same names"
            )
        totals = self._ranks.sum([own.get(name, 0.0) for name in self._count_names])
        return dict(zip(self._count_names, totals, strict=True))

    def _scaled(self, parts: LossParts, counts: Mapping[str, float], *, empty: bool) -> Tensor:
        """This microbatch's share of the step's loss, times the number of ranks."""
        if set(parts.sums) != set(self._weights):
            raise ValueError(
                f"the objective's loss terms {sorted(parts.sums)} are not those of its weights, {sorted(self._weights)}"
            )
        factors = {n: self._ranks.size * w / counts[n] if counts[n] else 0.0 for n, w in self._weights.items()}
        loss = torch.stack([factors[name] * parts.sums[name].float() for name in self._weights]).sum()
        return loss + self._touch() if empty else loss

    def _reduce(self, batches: Sequence[Batch], tally: _Tally, norm: Tensor, signum: int) -> _Reduced:
        """One message a step for everything: what stops the run, what ends it, and what is logged."""
        if self._log_names is None:
            self._log_names = self._ranks.union(tally.logs)
        unknown = set(tally.logs) - set(self._log_names)
        if unknown:
            raise ValueError(f"logs {sorted(unknown)} were not in the first step; give every loss the same names")
        zero = torch.zeros((), dtype=torch.float64, device=norm.device)
        bad_loss = ~torch.isfinite(torch.stack(tally.losses)).all()
        values = [bad_loss, ~torch.isfinite(norm), *tally.terms.values()]
        values += [tally.logs.get(name, zero) for name in self._log_names]
        tokens = sum(batch.num_tokens for batch in batches)
        padded = sum(batch.num_padded_tokens for batch in batches if isinstance(batch, PaddedBatch))
        host = [float(tokens), float(padded), *(float(signum == known) for known in SIGNALS)]
        total = self._ranks.sum(torch.cat([torch.stack([v.double() for v in values]), zero.new_tensor(host)]))
        end_terms = 2 + len(self._weights)
        end_logs = end_terms + len(self._log_names)
        raised = [known for known, count in zip(SIGNALS, total[end_logs + 2 :], strict=True) if count]
        return _Reduced(
            bad_loss=bool(total[0]),
            bad_norm=bool(total[1]),
            terms=dict(zip(self._weights, total[2:end_terms], strict=True)),
            logs=dict(zip(self._log_names, total[end_terms:end_logs], strict=True)),
            tokens=int(total[end_logs]),
            padded_tokens=int(total[end_logs + 1]),
            signum=int(raised[0]) if raised else 0,
        )

    def _stop(self, step: int, batches: Sequence[Batch], losses: Sequence[Tensor], *, bad_loss: bool) -> NoReturn:
        """Raise NonFiniteError that names ranks and rows: of the bad losses, or all if only the gradient is bad."""
        self._optimizer.adamw.zero_grad(set_to_none=True)
        suspects = [
            batch for batch, loss in zip(batches, losses, strict=True) if not bad_loss or not math.isfinite(float(loss))
        ]
        where = []
        for rank, names in enumerate(self._ranks.gather([name for batch in suspects for name in batch.names])):
            if names:
                more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
                where.append(f"rank {rank} (rows {', '.join(names[:MAX_NAMES])}{more})")
        raise NonFiniteError(
            f"step {step + 1}: the {'loss' if bad_loss else 'gradient'} is not finite on {'; '.join(where)}. "
            "The optimiser did not step, and the last checkpoint is as it was. Look at these rows, or lower optim.lr"
        )


def _noise(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """What dropout will draw from, on the CPU and on the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_noise(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
