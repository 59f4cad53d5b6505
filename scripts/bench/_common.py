"""What the benchmarks share: their arguments, timing in turns, memory, and the line that they end with."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

COMMON_KEYS = ("machine", "threads", "torch", "seconds")
_GB = 1e9
_STARTED = time.perf_counter()


def bench_parser(doc: str, quick: str) -> argparse.ArgumentParser:
    """Arguments of a benchmark: `--quick`, whose help says what is smaller. `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def progress(message: str) -> None:
    """A line on standard error."""
    print(message, file=sys.stderr, flush=True)


def finish(result: Mapping[str, Any], threads: int) -> None:
    """Print the last line: `result`, then machine, threads, torch version (null without torch) and seconds so far.

    Numbers are rounded to four significant digits; a number that is not finite is an error.
    """
    torch = None
    try:
        torch = version("torch")
    except PackageNotFoundError:
        progress("torch is not installed; the line says null")
    seconds = time.perf_counter() - _STARTED
    common = {"machine": machine(), "threads": threads, "torch": torch, "seconds": seconds}
    line = {name: _rounded(value) for name, value in {**result, **common}.items()}
    print(json.dumps(line, allow_nan=False), flush=True)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> str:
    """Architecture, system, processor and number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()} {platform.system()}, {_processor()}, {cores} cores"


def _processor() -> str:
    # Linux names it in a file; elsewhere the platform's own word has to do.
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown processor"


def peak_gb() -> float:
    """The most memory that this process ever held (1e9 bytes), mapped pages of files included."""
    # On Linux not getrusage: what it tells a child process includes what the parent held when it started the child.
    held = _status_gb("VmHWM")
    if held is None:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / _GB
    return held


def resident_gb() -> float:
    """What this process holds now (1e9 bytes); where the system does not tell, the most that it ever held."""
    held = _status_gb("VmRSS")
    return peak_gb() if held is None else held


def _status_gb(key: str) -> float | None:
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.removesuffix("kB")) * 1024 / _GB
    return None


def last_line(command: Sequence[str]) -> dict[str, Any]:
    """The JSON object that a program's output ends with; its progress goes to our standard error.

    Raises:
        subprocess.CalledProcessError: the program failed.
        ValueError: its last line is no JSON object.
    """
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True).stdout
    lines = output.splitlines() or [""]
    try:
        result = json.loads(lines[-1])
    except json.JSONDecodeError as error:
        raise ValueError(f"the last line of {' '.join(command)} is no JSON: {lines[-1][:200]!r}") from error
    if not isinstance(result, dict):
        raise ValueError(f"the last line of {' '.join(command)} is no JSON object: {lines[-1][:200]!r}")
    return result


def in_turns(sides: Mapping[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side in each repeat. The sides take turns, so that a machine that slows down slows all of them.

    A side is called with the number of the repeat.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run(repeat)
            seconds[name].append(time.perf_counter() - start)
        progress(f"repeat {repeat + 1} of {repeats}: " + ", ".join(f"{n} {s[-1]:.2f} s" for n, s in seconds.items()))
    return seconds


def median_ratio(rival: Sequence[float], ours: Sequence[float]) -> float:
    """Median over repeats of the rival's time over ours: above 1, ours is faster."""
    return statistics.median(theirs / own for theirs, own in zip(rival, ours, strict=True))
