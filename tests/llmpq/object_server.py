"""A server of objects on loopback that answers ranges and ETags, and fails as it is told."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class ObjectServer(ThreadingHTTPServer):
    """`objects` by path. The next requests of content meet `faults` in turn: a status to answer
    with, "cut" (half of the body, then the end of the connection), or None. Without `has_ranges`,
    every answer is a whole object. `asked`: the ranges that were asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.faults: list[int | str | None] = []
        self.has_ranges = True
        self.asked: list[str | None] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
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
