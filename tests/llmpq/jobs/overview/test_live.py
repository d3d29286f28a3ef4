"""The live pages as clients ask for them: what is shown and refused; nothing is changed."""

from __future__ import annotations

import base64
import hashlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.request import urlopen

import pytest

from llmpq.cli import jobs
from llmpq.jobs.overview.folder import JobFolder, SeenJob
from llmpq.jobs.overview.live import CLIENTS, ON_A_PAGE, JobServer, content_policy, jobs_page
from llmpq.jobs.overview.places import JobPlace
from llmpq.jobs.store import MANIFEST
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts
from tests.llmpq.made_journals import (
    BEGAN,
    START,
    died,
    ended,
    failed_rows,
    session,
    write_journal,
)
from tests.llmpq.report.pages import Page

HOSTILE = "<script>alert('1')<&script>"


def make_jobs(top: Path) -> Path:
    """A job that failed with events and errors, and a damaged one of a hostile name."""
    source = write_prompts(top.parent / "in.jsonl", *prompts(100))
    for name in ("out.jsonl", f"{HOSTILE}.jsonl"):
        top.mkdir(exist_ok=True)
        run_job(source, top / name, limit=80)
        entries = [*session(), died(BEGAN + 14), failed_rows(BEGAN + 30, 3, HOSTILE)]
        write_journal(top / f"{name}.job", [*entries, ended(BEGAN + 31, "failed", HOSTILE)])
    (top / f"{HOSTILE}.jsonl.job" / MANIFEST).write_text("no manifest")
    return top


@contextmanager
def served(top: Path, host: str = "127.0.0.1") -> Iterator[JobServer]:
    with JobServer(JobFolder(top, 4, confined=True), host, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    with served(make_jobs(tmp_path_factory.mktemp("jobs") / "outputs")) as found:
        yield found


def ask(
    server: JobServer, path: str = "/", method: str = "GET", **headers: str
) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read().decode()


def test_the_list_leads_to_each_job(server: JobServer) -> None:
    answer, text = ask(server)
    page = Page(text)
    assert answer.status == 200
    assert HOSTILE not in text
    assert "80/100" in page.text
    assert HOSTILE in page.text
    assert "cannot be read as the manifest of a job" in page.text
    links = [found["href"] for name, found in page.elements if name == "a" and "href" in found]
    assert links == ["#content", "/job?name=out.jsonl.job"]
    answer, text = ask(server, links[1])
    page = Page(text)
    assert answer.status == 200
    for told in ("80 of 100 done", "stage 1 died; replaced", "old/T4-16GB:0", "0123456789ab"):
        assert told in page.text
    assert page.text.count(HOSTILE) >= 2
    assert ("a", {"href": "/"}) in [(name, dict(found)) for name, found in page.elements]


def test_pages_look_again_by_themselves_and_load_nothing_else(server: JobServer) -> None:
    for path in ("/", "/job?name=out.jsonl.job"):
        answer, text = ask(server, path)
        assert '<noscript><meta http-equiv="refresh" content="5"/></noscript>' in text
        assert re.findall(r"<script[^>]*>", text) == ['<script data-seconds="5">']
        assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)| src=| on\w+=", text)
        policy = answer.getheader("Content-Security-Policy", "")
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        assert "style=" not in re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
        script = text.partition('<script data-seconds="5">')[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'; connect-src 'self'" in policy
        assert answer.getheader("Cache-Control") == "no-store"
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert "script-src 'none'" in content_policy("text")


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/job",
        "/job?name=",
        "/job?name=..%2F..%2Fetc%2Fpasswd",
        "/job?name=%2Fetc",
        "/job?name=%00",
        "/job?name=%ff",
        "/../../etc/passwd",
        "//evil.example/",
    ],
)
def test_what_is_no_job_is_not_found(server: JobServer, path: str) -> None:
    answer, text = ask(server, path)
    assert (answer.status, answer.getheader("Content-Type")) == (404, "text/plain; charset=utf-8")
    assert "root:" not in text


def test_nothing_can_be_changed(server: JobServer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"):
        answer, _ = ask(server, method=method)
        assert (answer.status, answer.getheader("Allow")) == (405, "GET, HEAD")
    answer, text = ask(server, method="HEAD")
    assert (answer.status, text) == (200, "")
    assert int(answer.getheader("Content-Length", "")) > 1000


def test_a_page_whose_name_leads_here_reads_nothing(server: JobServer) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""):
        answer, text = ask(server, Host=host)
        assert (answer.status, "Jobs" in text) == (403, False)
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8267", "[::1]:8267", "127.8.8.8"):
        assert ask(server, Host=host)[0].status == 200


def test_an_address_for_others_is_asked_by_itself(tmp_path: Path) -> None:
    """Names that a stranger's DNS could lead here are refused there too."""
    (tmp_path / "none").mkdir()
    with served(tmp_path / "none", "0.0.0.0") as server:
        for host, status in (("10.1.2.3:8267", 200), ("localhost", 200), ("evil.example", 403)):
            answer, text = ask(server, Host=host)
            assert answer.status == status
        assert "Jobs" not in text
        assert "There are no jobs in this folder" in ask(server)[1]


def test_too_many_clients_are_hung_up_on_and_the_others_served(server: JobServer) -> None:
    for _ in range(CLIENTS):
        assert server._clients.acquire(blocking=False)
    try:
        with pytest.raises(OSError):
            ask(server)
    finally:
        for _ in range(CLIENTS):
            server._clients.release()
    assert ask(server)[0].status == 200


def test_many_jobs_come_in_pages(tmp_path: Path) -> None:
    jobs = [
        SeenJob(f"{n}.jsonl.job", JobPlace(tmp_path / f"{n}.jsonl", tmp_path / f"{n}.jsonl.job"))
        for n in range(2 * ON_A_PAGE + 1)
    ]
    for number, shown, links in ((1, ON_A_PAGE, ["2"]), (2, ON_A_PAGE, ["1", "3"]), (9, 1, ["2"])):
        text = jobs_page(jobs, "outputs", number)
        assert text.count('data-head="state"><span>not read yet<') == shown
        assert re.findall(r'"/\?page=(\d+)"', text) == links
    assert "not read yet" in Page(text).text


def test_a_name_that_is_no_text_has_its_page(tmp_path: Path) -> None:
    """Linux has names of any bytes; the link to such a job leads to it."""
    source = write_prompts(tmp_path / "in.jsonl", *prompts(3))
    top = tmp_path / "outputs"
    named = top / "b\udcffd"
    named.mkdir(parents=True)
    run_job(source, named / "out.jsonl", limit=2)
    write_journal(named / "out.jsonl.job", [replace(START, rows=3)])
    with served(top) as server:
        _, text = ask(server)
        (link,) = re.findall(r'"(/job[^"]*)"', text)
        assert ask(server, link.replace("&amp;", "&"))[0].status == 200


def test_the_command_shows_jobs_until_it_is_interrupted(tmp_path: Path) -> None:
    make_jobs(tmp_path / "outputs")
    command = [sys.executable, "-m", "llmpq", "jobs", "serve", str(tmp_path / "outputs")]
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        told = process.stderr.readline()
        address = re.search(r"at (http://127\.0\.0\.1:\d+/); Ctrl-C ends it", told)
        assert address is not None, told
        with urlopen(address[1], timeout=60) as answer:
            assert "80/100" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_served_is_said(
    server: JobServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs.main(["serve", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert jobs.main(["serve", str(tmp_path), "--port", str(server.server_port)]) == 2
    assert "choose another --port or --host" in capsys.readouterr().err
    assert jobs.main(["serve", str(tmp_path), "--host", "no.such.name.invalid"]) == 2
    with pytest.raises(SystemExit, match="2"):
        jobs.main(["serve", "--port", "65536"])
