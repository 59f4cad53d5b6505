"""The command line: `retrail COMMAND ...`, and what every command does with its arguments and its errors.

Nothing heavy is imported here: `retrail --help` answers at once, and so does a typo.
"""

from __future__ import annotations

import argparse
import importlib
import linecache
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from .config import Command

COMMANDS = {
    "prep": "read a data set and write a prepared folder",
    "train": "fine-tune a retriever",
    "plan": "what a training run will take, without its weights",
    "sweep": "train once for every point of a grid",
    "export": "turn a run into a Hugging Face checkpoint",
    "calibrate": "fit budgets that keep the gold path as often as promised",
    "eval": "measure a retriever, with controls",
    "answers": "answer queries from what retrievers find, and judge the answers",
    "curve": "how much of the first level a walk must keep, with a picture",
    "pools": "judge fixed pools with fewer or more rivals a request",
    "static": "read the upper levels of a corpus once for all searches",
    "search": "answer one query and show the walk",
    "walks": "write what a retriever's searches judge, to train on",
    "serve": "answer decision requests over HTTP",
}

USAGE = """\
retrail {version}: train and run retrievers that decide, recurse and reason.

usage: retrail COMMAND [GROUP=CHOICE ...] [KEY=VALUE ...] [OPTIONS]

commands
{commands}

options of every command
  --help            its groups and keys
  --print-config    print the resolved settings and stop
  --config-dir DIR  a folder of your own YAML files, laid out like retrail/configs
  --traceback       show the whole stack of an error (or RETRAIL_TRACEBACK=1)
"""

# Read by the C libraries of torch when it is imported; what the user has set stays.
# - Threads that wait by spinning are many times slower as soon as anything else runs on the machine.
# - oneDNN keeps a kernel and its memory for every shape it has seen, 1,024 of them: gigabytes, for texts of any length.
CPU_DEFAULTS = {"GOMP_SPINCOUNT": "0", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}

PACKAGE = Path(__file__).resolve().parent.parent

T = TypeVar("T", bound=Command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 (the run failed) or 2 (the request was wrong)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h", "help"):
        print(_usage(), end="")
        return 0
    if name == "--version":
        from .. import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        from .keys import suggest

        _complain(f"unknown command {name!r}.{suggest(name, COMMANDS)} Commands: {', '.join(COMMANDS)}")
        return 2
    module = importlib.import_module(f".{name}", __package__)
    status: int = module.main(arguments[1:])
    return status


def run_command(settings: type[T], body: Callable[[T], int | None], argv: Sequence[str] | None = None) -> int:
    """Compose the settings of a command, run `body` with them, and return the exit status.

    An error that the package raises on purpose, or that the file system reports, is shown as one message; any
    other one with its stack.
    """
    for name, value in CPU_DEFAULTS.items():
        os.environ.setdefault(name, value)
    options = parse_options(settings.command, argv)
    if options.help:
        from .help import command_help

        print(command_help(settings, [options.config_dir] if options.config_dir else []), end="")
        return 0

    def composed() -> int | None:
        from .compose import compose, to_yaml

        run = compose(settings, options.overrides, config_dir=options.config_dir)
        if options.print_config:
            print(to_yaml(run), end="")
            return 0
        return body(run)

    return guarded(composed, show_stack=options.traceback)


def parse_options(command: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of every command, and its `overrides`."""
    parser = argparse.ArgumentParser(f"retrail {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--traceback", action="store_true", default=os.environ.get("RETRAIL_TRACEBACK", "0") != "0")
    return parser.parse_intermixed_args(argv)


def guarded(body: Callable[[], int | None], *, show_stack: bool = False) -> int:
    """The exit status of `body`, with its errors shown on standard error."""
    from ..train.signals import Interrupted
    from .compose import ConfigError

    try:
        return body() or 0
    except Interrupted as stop:
        _complain(str(stop))
        return stop.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except ConfigError as error:
        # Every rank of a launcher composes the same settings and would say the same.
        if os.environ.get("RANK", "0") == "0":
            _show(error, show_stack)
        return 2
    except Exception as error:
        _show(error, show_stack or not is_deliberate(error))
        return 2 if isinstance(error, (ValueError, LookupError, OSError)) and is_deliberate(error) else 1


def is_deliberate(error: BaseException) -> bool:
    """Whether `error` is meant for the user: raised by a `raise` of this package, or by the file system."""
    if isinstance(error, (AssertionError, NotImplementedError, TypeError)):
        return False
    if isinstance(error, OSError):
        return True
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return False
    file = frame.tb_frame.f_code.co_filename
    line = linecache.getline(file, frame.tb_lineno).strip()
    return Path(file).resolve().is_relative_to(PACKAGE) and line.startswith("raise")


def _show(error: BaseException, show_stack: bool) -> None:
    if show_stack:
        traceback.print_exception(error)
        return
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    _complain(text or type(error).__name__)


def _complain(message: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    where = f" (rank {os.environ.get('RANK', '0')})" if ranks > 1 else ""
    print(f"retrail{where}: {message}", file=sys.stderr)


def _usage() -> str:
    from .. import __version__

    commands = textwrap.indent("\n".join(f"{name:<10}{text}" for name, text in COMMANDS.items()), "  ")
    return USAGE.format(version=__version__, commands=commands)


if __name__ == "__main__":
    sys.exit(main())
