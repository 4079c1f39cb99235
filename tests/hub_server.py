"""A hub on this machine: enough of the Hugging Face hub's protocol to test the real client against."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from conftest import ROOT


class HubServer:
    """`with HubServer() as hub: hub.add("org/name", {"config.json": b"..."})`; clients use HF_ENDPOINT=hub.url.

    requests: (method, path, headers) of all requests so far.     gated: repositories that refuse everybody.
    good_token: if set, any other token gets 401, as a stale one does.    status: if set, the answer to everything.
    cut: that many bytes into a large file the connection breaks, once; `cuts` times.     stall: there it stays open,
    and silent.     pause: seconds of silence in each tenth of a large file.
    moved: repositories with a new name, to which requests are redirected.
    closes: a part of paths: such requests get no answer, the connection is closed.
    instead: what is sent for a large file in its place.
    hook: called with the path of each request.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repository -> commit -> file name -> content
        self.branches: dict[str, dict[str, str]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.gated: set[str] = set()
        self.good_token: str | None = None
        self.status: int | None = None
        self.cut: int | None = None
        self.cuts = 1
        self.pause = 0.0
        self.moved: dict[str, str] = {}
        self.closes: str | None = None
        self.instead: dict[bytes, bytes] = {}
        self.hook: Callable[[str], object] = lambda path: None
        self.stall = threading.Event()
        self.stalled = threading.Event()

    def add(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """A new commit, where `branch` then points."""
        commits = self.commits.setdefault(repo, {})
        commit = hashlib.sha1(f"{repo}{len(commits)}".encode()).hexdigest()
        commits[commit] = dict(files)
        self.branches.setdefault(repo, {})[branch] = commit
        return commit

    def asked(self) -> set[str]:
        """The names of the files that were asked for."""
        return {path.partition("/resolve/")[2].split("/", 1)[1] for _, path, _ in self.requests if "/resolve/" in path}

    def __enter__(self) -> HubServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stall.clear()
        self._server.shutdown()
        self._server.server_close()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _metadata(name: str, content: bytes) -> dict[str, Any]:
    """What the hub says about a file with ?blobs=true."""
    large = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return {"size": len(content), **({"lfs": large} if _is_large(name) else {})}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        hub.requests.append((self.command, path, dict(self.headers)))
        hub.hook(path)
        token = self.headers.get("Authorization")
        if hub.closes is not None and hub.closes in path:
            self.close_connection = True
            return
        if hub.status is not None:
            return self._reply(hub.status)
        if hub.good_token is not None and token is not None and token != f"Bearer {hub.good_token}":
            return self._reply(401, **{"X-Error-Message": "Invalid credentials in Authorization header"})
        if path.startswith("/lfs/"):
            return self._large(path[5:])
        api = path.startswith("/api/models/")
        repo, _, rest = path.removeprefix("/api/models/").strip("/").partition("/revision/" if api else "/resolve/")
        revision, _, name = (rest or "main").partition("/")
        if repo in hub.moved:
            return self._reply(307, Location=path.replace(repo, hub.moved[repo], 1))
        if repo not in hub.commits:  # the real hub does not tell strangers what does not exist from what is private
            return self._reply(404 if token else 401, **{"X-Error-Code": "RepoNotFound"})
        commit = hub.branches[repo].get(revision, revision)
        files = hub.commits[repo].get(commit)
        if files is None:
            return self._reply(404, **{"X-Error-Code": "RevisionNotFound"})
        if api:
            siblings = [{"rfilename": file, **_metadata(file, content)} for file, content in files.items()]
            if "blobs=true" not in self.path.lower():
                siblings = [{"rfilename": file} for file in files]
            body = json.dumps({"id": repo, "modelId": repo, "sha": commit, "private": False, "siblings": siblings})
            return self._reply(200, body.encode(), **{"Content-Type": "application/json"})
        if repo in hub.gated:
            return self._reply(403, **{"X-Error-Code": "GatedRepo"})
        if name not in files:
            return self._reply(404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        self._file(files[name], _is_large(name), commit)

    def _file(self, content: bytes, large: bool, commit: str) -> None:
        if not large:
            return self._reply(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', **{"X-Repo-Commit": commit})
        digest = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        # Large files lie on another host.
        elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
        self._reply(302, Location=f"{elsewhere}/lfs/{digest}", **linked, **{"X-Repo-Commit": commit})

    def _large(self, digest: str) -> None:
        contents = (c for commits in self.hub.commits.values() for files in commits.values() for c in files.values())
        content = next(c for c in contents if hashlib.sha256(c).hexdigest() == digest)
        content = self.hub.instead.get(content, content)
        first = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", f'"{digest}"')
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut is None:
            size = len(content) // 10 + 1 if self.hub.pause else len(content) + 1
            for start in range(first, len(content), size):
                self.wfile.write(content[start : start + size])
                time.sleep(self.hub.pause)
            return
        self.wfile.write(content[first : first + self.hub.cut])
        self.wfile.flush()
        if self.hub.stall.is_set():
            self.hub.stalled.set()
            while self.hub.stall.is_set():
                time.sleep(0.02)
        self.hub.cuts -= 1
        if not self.hub.cuts:
            self.hub.cut = None
        self.close_connection = True

    def _reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        # What the real hub sends to clients without a token, and what the client then logs as a warning.
        self.send_header("X-HF-Warning", "unauthenticated; You are sending unauthenticated requests")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def environment(url: str, home: Path, **extra: str) -> dict[str, str]:
    """A process's environment in which that hub is the hub, and `home` its cache."""
    keep = {key: os.environ[key] for key in ("PATH", "SYSTEMROOT") if key in os.environ}
    return {**keep, "PYTHONPATH": str(ROOT), "HF_HOME": str(home), "HF_ENDPOINT": url, **extra}
