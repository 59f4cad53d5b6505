"""`retrail serve` as a process, and `retriever=served:...` against it."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from decision_toy import toy_corpus
from http_servers import local_scorer, serving

from retrail.models.config import ServedOptions
from retrail.scripts import cli
from retrail.scripts.config import SearchBudget, ServeRun
from retrail.scripts.systems import open_retriever

CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal; a job in the background ignores it
from http_servers import local_scorer
from retrail.models import load
load.load_scorer = lambda path, device: local_scorer()
from retrail.scripts.cli import main
sys.exit(main(["serve", "retriever=export/d7", "port=0", *sys.argv[1:]]))
"""


def started(*arguments):
    helpers = Path(__file__).resolve().parents[2] / "helpers"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(helpers), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_serves_until_it_is_told_to_stop():
    child = started()
    try:
        line = child.stdout.readline()
        assert line.startswith("serving d7 at http://127.0.0.1:"), child.stderr.read()
        url = line.split()[3]
        assert httpx.get(f"{url}/v1/models", timeout=30).json()["models"][0]["name"] == "d7"
        answer = httpx.post(f"{url}/v1/rerank", json={"query": "q", "documents": ["a", "b"]}, timeout=30)
        assert len(answer.json()["results"]) == 2
        child.send_signal(signal.SIGINT)
        out, error = child.communicate(timeout=30)
        assert child.returncode == 130 and error == "retrail: interrupted\n"
    finally:
        child.kill()
        child.wait()


def test_another_address_is_warned_of(monkeypatch, capsys):
    import uvicorn

    from retrail.models import load

    monkeypatch.setattr(load, "load_scorer", lambda path, device: local_scorer())
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    assert cli.main(["serve", "retriever=export/d7", "port=0"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["serve", "retriever=export/d7", "port=0", "host=0.0.0.0", "name=jev"]) == 0
    out, error = capsys.readouterr()
    assert "no authentication: everyone who reaches http://0.0.0.0:" in error and out.startswith("serving jev at")


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "retriever=export/d7", f"port={port}"]) == 2
    assert f"cannot listen at host=127.0.0.1 port={port}" in capsys.readouterr().err


def test_a_folder_that_is_not_there(capsys):
    assert cli.main(["serve", "retriever=/nowhere", "port=0"]) == 2
    assert "/nowhere is not an exported retriever" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{"port": 70_000}, {"host": " "}, {"max_waiting": 0}, {"device": "tpu"}])
def test_wrong_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ServeRun(retriever="x", **settings)


def test_a_walk_with_a_server_equals_that_in_process():
    scorer, corpus = local_scorer(), toy_corpus()
    budget = SearchBudget(keep=[2], choose=3)
    with serving(scorer) as (url, _):
        retriever, about = open_retriever(
            f"served:systemone:m@{url}", corpus, budget, "cpu", served=ServedOptions(retries=0)
        )
        [there] = retriever.search(["where is jam?"], k=4)
        with pytest.raises(ValueError, match="served:PROTOCOL:MODEL@URL, e.g. served:systemone:d0@http"):
            open_retriever(f"served:systemone@{url}", corpus, budget, "cpu")
        retriever.scorer.close()
    from retrail.models.decision.navigate import Navigator

    [here] = Navigator(scorer, corpus, retriever.config).search(["where is jam?"], k=4)
    assert there.ids == here.ids and retriever.config.keep == [2]
    assert url in about and "'m'" in about and "max_candidates" in about
    assert there.cost.requests == here.cost.requests


def test_search_through_a_server(tmp_path, capsys):
    toy_corpus().save(tmp_path / "corpus")
    with serving(local_scorer()) as (url, _):
        arguments = [f"retriever=served:decisions:m@{url}", f"corpus={tmp_path}", "query=where is jam?", "show=json"]
        assert cli.main(["search", *arguments, "served.max_candidates=3"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 5
