"""Servers of objects on loopback that answer ranges and ETags, and fail as they are told: a plain
one, and one that speaks as the Hub does of a data set.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit


class ObjectServer(ThreadingHTTPServer):
    """`objects` by path. The next requests of content meet `faults` in turn: a status to answer
    with, "cut" (half of the body, then the end of the connection), or None. Without `has_ranges`,
    every answer is a whole object. `asked`: the ranges that were asked for.
    """

    daemon_threads = True

    def __init__(self, handler: type[_Handler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or _Handler)
        self.objects: dict[str, bytes] = {}
        self.faults: list[int | str | None] = []
        self.has_ranges = True
        self.asked: list[str | None] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


@contextmanager
def object_server(handler: type[_Handler] | None = None) -> Iterator[ObjectServer]:
    with ObjectServer(handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: ObjectServer

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        server = self.server
        content = server.objects.get(self.path)
        if content is None and self.path.endswith("/"):
            content = self._listing()
        if content is None:
            self.send_error(404)
            return
        fault = server.faults.pop(0) if server.faults and not is_head else None
        if isinstance(fault, int):
            self.send_error(fault)
            return
        asked = self.headers.get("Range")
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "") if server.has_ranges else None
        first = int(found[1]) if found else 0
        last = int(found[2]) if found and found[2] else len(content) - 1
        body = content[first : last + 1]
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.md5(content).hexdigest()}"')
        if found:
            self.send_header(
                "Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(content)}"
            )
        self.end_headers()
        if not is_head:
            server.asked.append(asked)
            self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)

    def _listing(self) -> bytes | None:
        names = [path for path in self.server.objects if path.startswith(self.path)]
        return "".join(f'<a href="{name}">{name}</a>' for name in names).encode() or None

    def log_message(self, *args: object) -> None:
        pass


REPO = "datasets/me/rows"
FILES = f"/{REPO}/resolve/main/"
"""Where the Hub has the files of the data set, in `objects`; its API speaks of these alone."""


class HubHandler(_Handler):
    """The part of the Hub's API by which its file system finds and reads the files of `REPO`."""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self.path = unquote(asked.path)
        known, _, rest = self.path.partition(f"/api/{REPO}")
        if known:
            super().do_GET()
        elif rest in ("", "/revision/main") and self.path.startswith("/api/"):
            self._answer_json({"id": REPO.partition("/")[2], "sha": "0" * 40})
        elif rest.startswith("/tree/main"):
            folder = rest.removeprefix("/tree/main").strip("/")
            is_deep = "recursive=true" in asked.query.lower()
            self._answer_json([each for each in self._entries() if _lies_in(folder, each, is_deep)])
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self._answer_json([each for each in self._entries() if each["path"] in asked])

    def _entries(self) -> list[dict[str, object]]:
        """All files of the data set, and their folders."""
        found: dict[str, dict[str, object]] = {}
        for name, content in self.server.objects.items():
            path = PurePosixPath(name.removeprefix(FILES))
            for each in (path, *path.parents[:-1]):
                kind, data = ("file", content) if each == path else ("directory", b"")
                about = {"oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
                found[str(each)] = {"type": kind, "path": str(each), **about}
        return list(found.values())

    def _answer_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _lies_in(folder: str, entry: dict[str, object], is_deep: bool) -> bool:
    parents = [str(each) for each in PurePosixPath(str(entry["path"])).parents]
    return (folder or ".") in (parents if is_deep else parents[:1])
