"""`retrail serve`: an exported decision model behind the endpoints of decision servers."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from .cli import run_command
from .config import ServeRun

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run(run: ServeRun) -> int:
    """Load the model and answer until the process is told to stop; what was accepted is answered first."""
    try:
        import uvicorn

        from ..models.decision.server import decision_app
    except ImportError as error:
        raise ValueError(f"retrail serve needs {error.name}: pip install 'retrail[serve]'") from error
    from ..models.load import load_scorer

    # Before the model is loaded, because that takes longer than to find the port taken.
    with _listening(run.host, run.port) as listener:
        scorer = load_scorer(run.retriever, device=run.device)
        name = run.name or Path(run.retriever).resolve().name
        app = decision_app(
            scorer,
            name=name,
            max_body_bytes=int(run.max_body_mb * 2**20),
            max_tokens=run.max_batch_tokens,
            max_waiting=run.max_waiting,
        )
        host = f"[{run.host}]" if ":" in run.host else run.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        if run.host not in LOOPBACK:
            print(f"retrail: no authentication: everyone who reaches {url} can use this model", file=sys.stderr)
        print(f"serving {name} at {url} (/v1/systemone, /v1/decisions, /v1/rerank); stop with Ctrl-C", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on")).run(sockets=[listener])
    return 0


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen at host={host} port={port}: {error.strerror}; choose another port") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(ServeRun, run, argv)


if __name__ == "__main__":
    sys.exit(main())
