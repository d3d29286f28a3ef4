"""The jobs below a folder as pages over HTTP, for people at this machine: nothing is changed, and
nothing but jobs is shown.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from llmpq.jobs.overview.folder import JobFolder, SeenJob
from llmpq.jobs.overview.page import job_page
from llmpq.jobs.overview.words import page_cells
from llmpq.report.rendering import render
from llmpq.version import llmpq_version
from quant.common.errors import InputError, SpecError
from quant.common.loopback import host_in, is_of_this_machine
from quant.common.text import printable

REFRESH_S = 5
LOOK_S = 1.0
"""Seconds of reading for one page; with thousands of jobs the next page knows the others."""

ON_A_PAGE = 100
CLIENTS, CLIENT_S = 32, 10.0
"""Requests at once, and seconds that each may be silent."""

LIST, JOB = "/", "/job"
LIST_HEADS = ("job", "state", "rows", "errors", "tokens/s", "predicted", "last sign", "model")

_INLINE = re.compile(r"<(style|script)\b[^>]*>(.*?)</\1>", re.DOTALL)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def jobs_page(jobs: list[SeenJob], folder: str, page: int = 1) -> str:
    """The `page`, from 1, of a list of jobs, as an HTML document."""
    pages = max(1, -(-len(jobs) // ON_A_PAGE))
    page = min(max(1, page), pages)
    states = [each.job.state for each in jobs if each.job is not None]
    wrong = sum(bool(each.wrong) for each in jobs)
    counts = [
        ("jobs", len(jobs)),
        *((name, states.count(name)) for name in ("running", "stopped", "done")),
        *([("damaged", wrong)] if wrong else []),
        *([("not read yet", left)] if (left := len(jobs) - len(states) - wrong) else []),
    ]
    return render(
        "jobs.html.j2",
        folder=printable(folder),
        jobs=jobs[(page - 1) * ON_A_PAGE : page * ON_A_PAGE],
        counts=counts,
        heads=LIST_HEADS,
        cells=page_cells,
        link=job_link,
        page=page,
        pages=pages,
        version=llmpq_version(),
        live=REFRESH_S,
    )


def job_link(seen: SeenJob) -> str:
    return f"{JOB}?{urlencode({'name': seen.name}, errors='surrogateescape')}"


def content_policy(page: str) -> str:
    """What a browser may do with a page: its own style and script, and asking for it again."""
    allowed: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
    inline = "; ".join(
        f"{kind}-src {' '.join(hashes) or chr(39) + 'none' + chr(39)}"
        for kind, hashes in allowed.items()
    )
    return (
        f"default-src 'none'; {inline}; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


class JobServer(ThreadingHTTPServer):
    """Shows the jobs of a folder at an address; raises `SpecError` where that cannot be had."""

    daemon_threads = True
    request_queue_size = CLIENTS

    def __init__(self, folder: JobFolder, host: str, port: int) -> None:
        self.folder, self._host = folder, host
        self._clients = BoundedSemaphore(CLIENTS)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = found[0]
            super().__init__((host, port), _Handler)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise SpecError(
                f"port {port} of {host} cannot be had ({why}); choose another --port or --host"
            ) from error

    @property
    def address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_port}/"

    def server_bind(self) -> None:
        """Bind without asking for the name of the address, which may take long."""
        super(ThreadingHTTPServer, self).server_bind()

    def answers_to(self, header: str) -> bool:
        """Whether the header `Host` names this server, and not a page that leads here.

        One that listens for other machines is asked by its address, or by its own name.
        """
        name = host_in(header)
        if is_of_this_machine(self._host) or is_of_this_machine(name):
            return is_of_this_machine(name)
        if name in (self._host.lower(), socket.gethostname().lower()):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or hang up where there are too many already."""
        if self._clients.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have gone."""

    def page(self, path: str, query: str) -> str:
        """The page at an address; raises `InputError` for what is not there."""
        given = parse_qs(query, errors="surrogateescape")
        if path == LIST:
            number = given.get("page", ["1"])[0]
            page = int(number) if number.isdecimal() and len(number) < 9 else 1
            return jobs_page(self.folder.look(LOOK_S), str(self.folder.top), page)
        if path == JOB and "name" in given:
            job = self.folder.job(given["name"][0])
            return job_page(job, REFRESH_S if job.state != "done" else None, home=LIST)
        raise InputError("there is no such page; / has the jobs")


class _Handler(BaseHTTPRequestHandler):
    server: JobServer
    server_version, sys_version = "llmpq", ""
    timeout = CLIENT_S

    def parse_request(self) -> bool:
        """Read the request's head; what neither reads nor is meant for this server ends here."""
        if not super().parse_request():
            return False
        if self.command not in ("GET", "HEAD"):
            self._send(
                HTTPStatus.METHOD_NOT_ALLOWED, "pages are read by GET and HEAD", "text/plain"
            )
            return False
        if not self.server.answers_to(self.headers.get("Host", "")):
            text = f"open {self.server.address}; this name is not that of the machine"
            self._send(HTTPStatus.FORBIDDEN, text, "text/plain")
            return False
        return True

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        try:
            page = self.server.page(asked.path, asked.query)
        except InputError as error:
            self._send(HTTPStatus.NOT_FOUND, str(error), "text/plain")
        except Exception as error:  # one page's fault is told on it, and ends nothing else
            text = f"this page cannot be made: {type(error).__name__}"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, text, "text/plain")
        else:
            self._send(HTTPStatus.OK, page, "text/html")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        data = text.encode(errors="replace")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", content_policy(text))
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: who looks is nobody's business."""
