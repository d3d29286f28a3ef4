"""Joining or starting Ray for the length of a run."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from os import environ
from typing import TYPE_CHECKING, Any

from actors.processes.device import local_ray_environment, stage_environment, visible_gpus
from llmpq.remote.light_head import SETTINGS, light_head, replaced
from llmpq.remote.starting import SlowStartError, not_joined, not_started
from llmpq.remote.token import check_token, make_token, warn_of_readers
from llmpq.remote.words import caught_words, is_verbose
from llmpq.remote.worker_forks import WorkerForks
from planner.cluster.accelerators import reported_accelerator
from quant.common.errors import DeviceError, SpecError, StageLostError
from quant.common.text import without_user

if TYPE_CHECKING:
    from llmpq.remote.local_ray import GiveUp

CONNECT_TIMEOUT_S = 10.0


def joins_ray(address: str | None) -> bool:
    """Whether `ray_session` takes a Ray that is there, and starts none; known without Ray."""
    is_joined = "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())
    return is_joined or (address or environ.get("RAY_ADDRESS") or "local") != "local"


_AHEAD: ContextVar[WorkerForks | None] = ContextVar("_AHEAD", default=None)
"""What `prepared_ahead` has started, until somebody takes it."""


@contextmanager
def prepared_ahead() -> Iterator[None]:
    """Begin to prepare what `prepared_forks` of a local Ray returns in the body; where nobody takes
    it, it is ended.
    """
    _AHEAD.set(prepared_forks(None))
    try:
        yield
    finally:
        _end_ahead()


def _end_ahead() -> None:
    forks = _AHEAD.get()
    _AHEAD.set(None)
    if forks is not None:
        forks.close()


def prepared_forks(address: str | None) -> WorkerForks | None:
    """Start what the workers of a local Ray are forks of, seconds before `ray_session` starts that.

    None where Ray is joined, where it is told already how to start its workers, and where there are
    GPUs, which libraries may look at before a fork that is to use them.
    """
    told = "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ
    if joins_ray(address) or told or not sys.platform.startswith("linux"):
        _end_ahead()
        return None
    ahead = _AHEAD.get()
    if ahead is not None:
        _AHEAD.set(None)
        return ahead
    return None if visible_gpus() else WorkerForks(stage_environment(1))


@contextmanager
def ray_session(
    address: str | None = None, give_up: GiveUp | None = None, forks: WorkerForks | None = None
) -> Iterator[None]:
    """An initialised Ray: the one already joined, that of `address` or RAY_ADDRESS, or a local one,
    whose workers are `forks`, if they are given, else those that it starts itself.

    `LocalHead` supervises a local one, with `give_up`. What is started or joined here is left at
    the end; what was there before stays. Raises `SpecError` for an address with a password,
    `DeviceError` when no cluster answers at `address` or it wants another token, and
    `HeadLostError` for what fails because a Ray of this process's own is gone.
    """
    import ray

    from llmpq.remote.local_ray import LocalHead

    if ray.is_initialized():
        with head_loss_raised():
            yield
        return
    target = address or environ.get("RAY_ADDRESS") or "local"
    with ExitStack() as stack:
        _start_twice(target, forks)
        stack.enter_context(_without_node_reports())
        if target == "local":
            head = stack.enter_context(LocalHead(give_up))
            stack.callback(_shut_down)
            stack.callback(head.note_started)
        else:
            stack.callback(_shut_down)
        stack.enter_context(head_loss_raised())
        yield


def _start_twice(target: str, forks: WorkerForks | None) -> None:
    """Start or join Ray; a local one that does not come up in time is ended, and started again."""
    if target != "local":
        _start(target)
        return
    try:
        with _nothing_left():
            _start(target, forks)
    except SlowStartError:
        warnings.warn("Ray was not up in time; it is started once more", stacklevel=4)
        _shut_down()  # so that Ray starts anew, also where it got as far as the connection
        with _nothing_left():
            _start(target, forks)


def _gpus_by_type() -> dict[str, list[str]]:
    """The UUIDs of this machine's GPUs by the names of their types, as far as these have one."""
    found: dict[str, list[str]] = {}
    for gpu in visible_gpus():
        with suppress(SpecError):
            name = reported_accelerator(gpu.name, gpu.memory_bytes).name
            found.setdefault(name, []).append(gpu.uuid)
    return found


def _shut_down() -> None:
    """Leave Ray without its farewell."""
    import ray

    with caught_words():
        ray.shutdown()


@contextmanager
def _nothing_left() -> Iterator[None]:
    """Where Ray's start fails, end what it has started: agents outlive the raylet by a minute."""
    from actors.processes.ray_head import below_this, end_all

    before = below_this()
    try:
        yield
    except BaseException:
        end_all(each for each in below_this() if each not in before)
        raise


def _start(target: str, forks: WorkerForks | None = None) -> None:
    """Initialise Ray, and restore the handler of SIGTERM."""
    import ray

    # Errors of calls to dead stages are handled where they matter; Ray need not print them.
    environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if not is_verbose():
        environ.setdefault("GRPC_VERBOSITY", "NONE")  # else it speaks of every fork
    handler = signal.getsignal(signal.SIGTERM)
    own: dict[str, Any] = {}
    if target == "local":
        gpus = _gpus_by_type()
        own = {"include_dashboard": False, "_system_config": SETTINGS}
        own |= {"resources": {name: len(uuids) for name, uuids in gpus.items()}}
        environ.update(local_ray_environment(gpus) if gpus else {})
        make_token()
    else:
        _check_joinable(target)
    warn_of_readers()
    with caught_words(last_told=True) as words:
        try:
            with light_head(forks) if target == "local" else nullcontext():
                level = logging.INFO if is_verbose() else logging.ERROR
                ray.init(address=target, log_to_driver=False, logging_level=level, **own)
        except SystemExit as error:
            # Ray puts its own handler of SIGTERM there before anything else, and leaves with 15
            if error.code == signal.SIGTERM and callable(handler):
                handler(signal.SIGTERM, None)
            raise
        except Exception as error:  # Ray raises bare ones too, such as for its start-up time-out
            local = target == "local"
            raise (
                not_started(error, words.text) if local else not_joined(target, error, words.text)
            ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own there


@contextmanager
def head_loss_raised() -> Iterator[None]:
    """Turn what Ray and stages raise into `HeadLostError` where that is its cause."""
    from ray.exceptions import RayError

    from actors.processes.ray_head import check_head

    try:
        yield
    except (RayError, StageLostError, DeviceError, OSError):
        check_head()
        raise


@contextmanager
def _without_node_reports() -> Iterator[None]:
    """Keep reports of Ray's nodes off stdout, where results may go, as Ray's debugger does."""
    from ray._private import worker

    with replaced(worker, "_worker_logs_enabled", lambda _: False):
        yield


def _check_joinable(target: str) -> None:
    """Fail at once where nothing listens or another token is wanted: Ray tries for minutes."""
    if "@" in target:
        raise SpecError(
            "--address and RAY_ADDRESS take no user and password, which Ray does not know either "
            f"({without_user(target)!r}); set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        )
    address = _started_last() if target == "auto" else target.removeprefix("ray://")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        if target == "auto":  # that one is gone, and Ray looks for others
            return
        raise DeviceError(
            f"no Ray cluster answers at {target!r} ({error}); start one with `ray start --head` or "
            "leave --address out for a local one"
        ) from error
    if not target.startswith("ray://"):
        check_token(address)


def _started_last() -> str:
    """HOST:PORT of the Ray that was started last here, which is `auto`; empty for none."""
    try:
        from ray._private.utils import read_ray_address
    except ImportError:  # a Ray that has it elsewhere
        return ""
    return read_ray_address() or ""
