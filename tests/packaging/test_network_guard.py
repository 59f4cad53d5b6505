"""The guard that keeps the tests on this machine."""

import os
import socket

import pytest


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("2001:db8::1", 80)])
def test_no_connection_to_another_machine(address):
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as client, pytest.raises(RuntimeError, match="tests stay on this machine"):
        client.settimeout(0.1)
        client.connect(address)


def test_no_lookup_of_another_machine():
    with pytest.raises(RuntimeError, match=r"looked up 'example\.invalid'"):
        socket.create_connection(("example.invalid", 80), timeout=0.1)


def test_this_machine_can_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.getpeername() == server.getsockname()


def test_hubs_are_offline():
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["WANDB_MODE"] == "offline"
