"""What every test has: no network, one thread, and the folder of real data where there is one."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Before any test module imports torch or transformers; child processes inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    TOKENIZERS_PARALLELISM="false",
    NO_COLOR="1",
    COLUMNS="200",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")


class NetworkRefused(RuntimeError):
    """A test wanted to reach another machine."""


def _is_local(host: object) -> bool:
    if host in (None, "", b"", "localhost", b"localhost"):
        return True
    text = host.decode() if isinstance(host, bytes) else str(host)
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return text == socket.gethostname()


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Any:
    """Sockets reach this machine only; a test that wants more fails instead of waiting."""
    patch = pytest.MonkeyPatch()
    for name in ("connect", "connect_ex"):
        patch.setattr(socket.socket, name, _guarded_connect(getattr(socket.socket, name)))
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_local(host):
            raise NetworkRefused(f"a test looked up {host!r}; tests stay on this machine")
        return resolve(host, *args, **kwargs)

    patch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    patch.undo()


def _guarded_connect(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            raise NetworkRefused(f"a test connected to {address!r}; tests stay on this machine")
        return connect(self, address)

    return guarded


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real benchmark data: RETRAIL_DATA, or ../shared/data beside the repository."""
    named = os.environ.get("RETRAIL_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no benchmark data in {folder}; set RETRAIL_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository, which is the root of the package."""
    return REPOSITORY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "data_dir" in getattr(item, "fixturenames", ()):
            item.add_marker("data")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
