"""Commands as jobs of a Ray cluster, through the Jobs API of its dashboard."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llmpq.remote.starting import error_reason
from llmpq.remote.token import refused_token, warn_of_readers
from quant.common.errors import DeviceError, InputError, SpecError
from quant.common.text import printable, without_user

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


ANSWER_S = 10.0
"""Seconds within which a dashboard must answer for the first time."""

_OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that Ray's client prefers to the address it is given."""

_VERBOSE_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
"""Loggers of Ray that report every upload."""


def checked_address(address: str, option: str) -> str:
    """`address` without a last slash; `SpecError` naming `option` where it is no dashboard's."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise SpecError(
            f"{option} wants the address of the cluster's dashboard, as http://HEAD:8265; "
            f"{without_user(address)!r} is none"
        )
    if "@" in parts.netloc:
        raise SpecError(
            f"{option} takes no user and password in the address, which would be shown in "
            "messages; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        )
    return address.rstrip("/")


def check_dashboard(address: str) -> None:
    """Fail soon where no Ray dashboard answers: Ray's client waits without limit."""
    import requests

    try:
        answer = requests.get(f"{address}/api/version", timeout=ANSWER_S)
        known = not answer.ok or "ray_version" in answer.json()
    except ValueError:
        known = False
    except OSError as error:
        raise no_answer(address, error) from error
    if not known or answer.status_code == 404:
        raise DeviceError(
            f"what answers at {address} is no Ray dashboard (status {answer.status_code}); name "
            "the address that `ray start --head` printed, by default http://HEAD:8265"
        )


def no_answer(address: str, error: OSError) -> DeviceError:
    return DeviceError(
        f"no Ray dashboard answers at {address} ({error_reason(error)}); is it the address that "
        "`ray start --head` printed, and is port 8265 reachable from here?"
    )


def dashboard_client(address: str) -> JobSubmissionClient:
    """Ray's client for just this address, without its notes on uploads."""
    from ray.job_submission import JobSubmissionClient

    for name in _VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    saved = {name: os.environ.pop(name) for name in _OVERRIDING if name in os.environ}
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update(saved)


QUIET_S = 150.0
"""Seconds without log after which a connection counts as dead; a run writes a line a minute."""


class JobLog:
    """The log of a job, of which each character is written once."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write = write
        self._written = 0

    async def tail(self, client: JobSubmissionClient, job_id: str) -> None:
        """Write what is new of the log; `TimeoutError` when nothing came for `QUIET_S`."""
        seen = 0
        async with asyncio.timeout(QUIET_S) as limit:
            async for text in client.tail_job_logs(job_id):
                limit.reschedule(asyncio.get_running_loop().time() + QUIET_S)
                self.take(text, seen)
                seen += len(text)

    def take(self, text: str, begin: int = 0) -> None:
        """Write what is new of a `text` that stands at the character `begin`."""
        new = text[max(0, self._written - begin) :]
        if new:
            self._written = begin + len(text)
            self._write(new)


RECONNECT_S = 300.0
"""Seconds for which a cluster may be silent while a job is followed: a restart of its head takes a
minute or two, after which Ray has forgotten the job.
"""

RETRY_S = 2.0

STOP_WAIT_S = 60
"""Between SIGTERM and SIGKILL; Ray's own 3 s are short for freeing actors on a busy cluster."""

_STOP_POLL_S = 0.5
_STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
_SUBMITTED_VARIABLE = "LLMPQ_SUBMITTED"
_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_AGENT_REMEDY = (
    " (if that stays so, another Ray on the head holds its agent's port; start this one with "
    "`ray start --head --dashboard-agent-listen-port=PORT`)"
)


@dataclass(frozen=True)
class JobEnd:
    """End of a job: Ray's word for it, its command's exit code, or Ray's `message` without one."""

    status: str
    exit_code: int | None
    message: str


@dataclass(frozen=True)
class KnownJob:
    """A job of llmpq that a cluster knows: Ray's `status`, seconds of the Unix clock at which it
    began and ended (None: not yet), its `output`, and its command.
    """

    id: str
    status: str
    began_at: float | None
    ended_at: float | None
    exit_code: int | None
    output: str
    command: str


class RayJobs:
    """The jobs of the cluster whose dashboard is at `address`, which `option` of a command named.

    All methods raise `DeviceError` where it does not answer or wants another token, and
    `InputError` for a job it does not know.
    """

    def __init__(self, address: str, option: str = "--submit") -> None:
        self.address = checked_address(address, option)
        warn_of_readers()
        check_dashboard(self.address)
        with self._explained_errors():
            self._client = dashboard_client(self.address)

    def submit(self, command: str, folder: Path) -> str:
        """Run `command`, a shell line, in a copy of `folder` on the head; returns the job's id."""
        environment = {
            "working_dir": str(folder),
            "env_vars": {_STOP_WAIT_VARIABLE: str(STOP_WAIT_S), _SUBMITTED_VARIABLE: "1"},
        }
        with self._explained_errors():
            return self._client.submit_job(entrypoint=command, runtime_env=environment)

    def follow(self, job_id: str, write: Callable[[str], Any]) -> JobEnd:
        """Hand the log to `write` until the job ends, through lost connections, nothing twice. Its
        last lines, which a connection that is closed in good order may lack, are asked for then.
        """
        import aiohttp

        self._end(job_id)
        log = JobLog(write)
        while True:
            try:
                asyncio.run(log.tail(self._client, job_id))
            except BrokenPipeError:
                raise  # nobody reads any more
            except (OSError, RuntimeError, aiohttp.ClientError):
                pass
            end = self._end_soon(job_id)
            if end is not None:
                with self._explained_errors(job_id):
                    log.take(self._client.get_job_logs(job_id))
                return end
            time.sleep(RETRY_S)

    def known(self) -> list[KnownJob]:
        """The jobs of llmpq that the cluster knows, the latest first."""
        with self._explained_errors():
            found = self._client.list_jobs()
        jobs = [_known(each) for each in found if _is_of_llmpq(each)]
        return sorted(jobs, key=lambda job: -(job.began_at or 0.0))

    def _end_soon(self, job_id: str) -> JobEnd | None:
        """The end of the job, None if it goes on; asks again for a while where nothing answers."""
        deadline = time.monotonic() + RECONNECT_S
        while True:
            try:
                return self._end(job_id)
            except DeviceError as error:
                if time.monotonic() > deadline:
                    raise DeviceError(
                        f"{error}. Job {job_id} may be going on; follow it again later"
                    ) from error
            time.sleep(RETRY_S)

    def stop(self, job_id: str) -> JobEnd:
        """Send SIGTERM to the job and wait for its end, if need be by SIGKILL."""
        with self._explained_errors(job_id):
            self._client.stop_job(job_id)
        deadline = time.monotonic() + 2 * STOP_WAIT_S
        while (end := self._end(job_id)) is None:
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"job {job_id} has not ended {2 * STOP_WAIT_S} s after it was told to; is the "
                    "node of its driver alive? `ray list nodes` tells"
                )
            time.sleep(_STOP_POLL_S)
        return end

    def _end(self, job_id: str) -> JobEnd | None:
        with self._explained_errors(job_id):
            job = self._client.get_job_info(job_id)
        if not job.status.is_terminal():
            return None
        return JobEnd(str(job.status), job.driver_exit_code, job.message or "")

    @contextmanager
    def _explained_errors(self, job_id: str | None = None) -> Iterator[None]:
        import ray.exceptions

        unauthenticated: Any = getattr(ray.exceptions, "AuthenticationError", ())  # since Ray 2.52
        try:
            yield
        except unauthenticated as error:
            raise refused_token(f"the Ray cluster at {self.address}") from error
        except OSError as error:
            raise no_answer(self.address, error) from error
        except (RuntimeError, ValueError) as error:
            if job_id is not None and "status code 404" in str(error):
                raise InputError(
                    f"the Ray cluster at {self.address} knows no job {job_id}; "
                    "`ray job list` names those it has"
                ) from error
            remedy = _AGENT_REMEDY if "No available agent" in str(error) else ""
            raise DeviceError(
                f"the Ray cluster at {self.address} refused: {error_reason(error)}{remedy}"
            ) from error


def _is_of_llmpq(details: Any) -> bool:
    """Whether a job was submitted by this class, or runs one of llmpq's commands."""
    environment = (details.runtime_env or {}).get("env_vars") or {}
    if _SUBMITTED_VARIABLE in environment:
        return True
    words = _words(details.entrypoint)
    return any(Path(word).name.partition("-")[0] == "llmpq" for word in words[:3])


def _known(details: Any) -> KnownJob:
    words = _words(details.entrypoint)
    at = [number for number, word in enumerate(words[:-1]) if word == "--output"]
    began, ended = (
        None if not each else each / 1e3 for each in (details.start_time, details.end_time)
    )
    return KnownJob(
        id=str(details.submission_id or details.job_id or ""),
        status=str(getattr(details.status, "value", details.status)),
        began_at=began,
        ended_at=ended,
        exit_code=details.driver_exit_code,
        output=words[at[-1] + 1] if at else "",
        command=printable(details.entrypoint or ""),
    )


def _words(command: str | None) -> list[str]:
    try:
        return shlex.split(command or "")
    except ValueError:  # quotes that do not close
        return (command or "").split()


def keep_folder_to_driver(environment: MutableMapping[str, str]) -> None:
    """Have stages of a job of `RayJobs.submit` not start in copies of the job's folder.

    They need none of it, and Ray nodes of one machine share its place: each that unpacks its copy
    removes that of the others first, which the driver still uses.
    """
    if _SUBMITTED_VARIABLE not in environment or _CONFIG_VARIABLE not in environment:
        return
    config = json.loads(environment[_CONFIG_VARIABLE])
    config.get("runtime_env", {}).pop("working_dir", None)
    environment[_CONFIG_VARIABLE] = json.dumps(config)
