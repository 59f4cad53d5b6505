"""A stand-in for the Hub on this machine: the endpoints that creating a repository and uploading a folder call.

/api/repos/create, /api/validate-yaml, /api/models/ORG/NAME/preupload/main, the LFS batch and upload, and the commit.
What was committed lies in `repos`, as {path: bytes}.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_averysecrettoken"


class FakeHub(ThreadingHTTPServer):
    """`refuse`: {part of a path: HTTP status} of requests that are turned away."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.commits = 0
        self.requests: list[str] = []
        self.refuse: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, value: object, status: int = 200, message: str = "") -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if message:
            self.send_header("X-Error-Message", message)
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _refused(self) -> bool:
        self.server.requests.append(f"{self.command} {self.path}")
        for part, status in self.server.refuse.items():
            if part in self.path:
                self._answer({"error": "no"}, status, "you may not do that")
                return True
        if not self.path.startswith("/blob/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "who are you?"}, 401, "Invalid username or password.")
            return True
        return False

    def do_POST(self) -> None:
        body = self._body()
        if self._refused():
            return
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"warnings": [], "errors": []})
        elif path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.server.url}/blob/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif path.endswith("/commit/main"):
            self._commit(path, body)
        else:
            self._answer({"error": f"unknown {path}"}, 404)

    def do_PUT(self) -> None:
        body = self._body()
        if self._refused():
            return
        self.server.blobs[self.path.rpartition("/")[2]] = body
        self._answer({})

    def do_GET(self) -> None:
        if not self._refused():
            repo = self.path.removeprefix("/api/models/").partition("/revision")[0].partition("?")[0]
            known = repo in self.server.repos
            self._answer({"id": repo, "sha": "0" * 40, "siblings": []} if known else {}, 200 if known else 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        repo = f"{wanted['organization']}/{wanted['name']}"
        self.server.created.append(wanted)
        if repo in self.server.repos:
            self._answer({"url": f"{self.server.url}/{repo}", "error": "exists"}, 409)
            return
        self.server.repos[repo] = {}
        self._answer({"url": f"{self.server.url}/{repo}", "name": repo})

    def _commit(self, path: str, body: bytes) -> None:
        repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
        files = self.server.repos[repo]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                blob = self.server.blobs[value["oid"]]
                assert sha256(blob).hexdigest() == value["oid"] and len(blob) == value["size"]
                files[value["path"]] = blob
        self.server.commits += 1
        self._answer({"commitUrl": f"{self.server.url}/{repo}/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None})


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A running stand-in."""
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
