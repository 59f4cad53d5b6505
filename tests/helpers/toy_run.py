"""Trains the toy in a process of its own: `python toy_run.py RUN_DIR [KEY=VALUE ...]`.

Keys: steps, pause (seconds before each step, so that a signal finds it at work), device, processes, evaluate
(seconds an evaluation takes), naive (initialise Accelerate first, as a careless script would).
Prints `batch N` before each collated batch, `done LOSS` at the end, and ends with 130 or 143 when interrupted.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from toy_objective import ToyModel, ToyObjective, toy_config

from retrail.train.distributed import end_processes
from retrail.train.loop import fit
from retrail.train.signals import Interrupted


class SlowObjective(ToyObjective):
    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause
        self.calls = 0

    def collate(self, rows):
        self.calls += 1
        print("batch", self.calls, flush=True)
        time.sleep(self.pause)
        return super().collate(rows)


def evaluation(seconds: float):
    def evaluate(model, step):
        print("evaluating", step, flush=True)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                time.sleep(0.01)
            except Exception:
                # As inference code that carries on after an error of one query.
                continue
        return {"score": 0.5}

    return evaluate


def main(run_dir: str, *arguments: str) -> int:
    options = dict(argument.split("=", 1) for argument in arguments)
    if "naive" in options:
        from accelerate import PartialState

        PartialState()
    config = toy_config(max_steps=int(options.get("steps", "12")), max_tokens=10_000, save_every=2, eval_every=4)
    config.runtime.device = options.get("device", "cpu")
    config.runtime.num_processes = int(options["processes"]) if "processes" in options else None
    try:
        result = fit(
            ToyModel(dropout=0.2),
            SlowObjective(float(options.get("pause", "0"))),
            config=config,
            run_dir=Path(run_dir),
            evaluate=evaluation(float(options["evaluate"])) if "evaluate" in options else None,
            fingerprint={"data": "toy"},
        )
    except Interrupted as stop:
        print("interrupted:", stop, file=sys.stderr, flush=True)
        return stop.exit_code
    end_processes()
    # In one write: torchrun starts Python unbuffered, and the pieces of two ranks' prints would mix.
    sys.stdout.write(f"done {result.loss} rank {os.environ.get('RANK', '0')}\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
