"""The dashboard of a Ray cluster: its address, whether it answers, and Ray's client for it."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quant.common.errors import DeviceError, SpecError
from quant.common.text import without_user

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
    """`address` without a slash at its end; raises `SpecError` naming `option` if it is no
    dashboard's.
    """
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


def error_reason(error: BaseException) -> str:
    """The part of an error that a message shows.

    That is what the system said; else the last line of a traceback, or the first sentence.
    """
    text = str(error)
    system = re.search(r"\[Errno -?\d+\] [\w ]+", text)
    if system is not None:
        return system[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    is_trace = any(line.startswith("Traceback") for line in lines)
    return (lines[-1] if is_trace else lines[0].partition(". ")[0])[:300]
