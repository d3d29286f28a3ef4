"""Joining or starting Ray for the length of a run."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ

from quant.errors import DeviceError

CONNECT_TIMEOUT_S = 10.0


@contextmanager
def ray_session(address: str | None = None) -> Iterator[None]:
    """An initialised Ray: the one already joined, that of `address` or RAY_ADDRESS, else a local
    one.

    What is started or joined here is left at the end; what was there before stays. Raises
    `DeviceError` when no cluster answers at `address`.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    # What stages that die were still asked is handled where it matters, and no news to anybody.
    environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    handler = signal.getsignal(signal.SIGTERM)
    target = address or environ.get("RAY_ADDRESS") or "local"
    _check_answers(target)
    try:
        ray.init(
            address=target,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if target == "local" else None,
        )
    except SystemExit as error:
        # Ray puts its own handler of SIGTERM there before anything else, and leaves with 15
        if error.code == signal.SIGTERM and callable(handler):
            handler(signal.SIGTERM, None)
        raise
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DeviceError(
            f"no Ray cluster answers at {target!r}: {error}; start one with `ray start --head`, or "
            "if it asks for a token set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own there
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(target: str) -> None:
    """Fail at once where nothing listens: `ray.init` would keep trying for minutes."""
    host, _, port = target.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise DeviceError(
            f"no Ray cluster answers at {target!r} ({error}); start one with `ray start --head` or "
            "leave --address out for a local one"
        ) from error
