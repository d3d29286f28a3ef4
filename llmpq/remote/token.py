"""The token that admits processes to a Ray cluster: made for a local Ray before Ray makes one that
others can read, and tried before a cluster is joined.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import warnings
from os import environ
from pathlib import Path
from typing import Any

from quant.common.errors import DeviceError

TOKEN_BYTES = 32  # as in Ray's own (authentication_token_generator.py)
PROBE_S = 10.0
_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def token_file() -> Path | None:
    """The file in which Ray looks for the token; None where `RAY_AUTH_TOKEN` holds it."""
    if environ.get(_TOKEN):
        return None
    return Path(environ.get(_PATH) or Path.home() / ".ray" / "auth_token")


def make_token() -> None:
    """Write a local Ray's token where Ray would, for this user alone, if there is none. Where that
    cannot be, as in a container whose user has no home, processes have it from their environment.
    """
    try:
        path = token_file()
        if path is None or environ.get(_PATH) or not _uses_tokens():
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_new(path, secrets.token_hex(TOKEN_BYTES))
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        environ[_TOKEN] = secrets.token_hex(TOKEN_BYTES)


def _write_new(path: Path, text: str) -> None:
    """Write a file whole or not at all, and never over what another run has written meanwhile."""
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w") as file:
            file.write(text)
        try:
            os.link(aside, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            os.rename(aside, path)
            return
    finally:
        aside.unlink(missing_ok=True)


def warn_of_readers() -> None:
    """Warn where others than the user can read or write the token that Ray takes."""
    try:
        path = token_file()
        if path is None or not _uses_tokens():
            return
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, RuntimeError):
        return
    if mode & 0o077:
        warnings.warn(
            f"others can read Ray's token {path} (mode {mode:04o}), and who has it runs programs "
            f"as you while Ray runs; close it with `chmod 600 {path}`",
            stacklevel=4,
        )


def _uses_tokens() -> bool:
    """Whether a local Ray asks for its token: unless it was told not to (Ray 2.60)."""
    return environ.get(_MODE, "token").lower() == "token"


def check_token(address: str) -> None:
    """Ask the Ray at `address`, HOST:PORT, whether it admits this process.

    If need be with the token of here: `ray.init` would go on trying for half a minute, and print a
    line every second. A Ray that wants no token is shown none: a process that sends tokens does not
    accept the answers of such a cluster's workers. Raises `DeviceError` where this process is not
    admitted, or where there is no Ray.
    """
    try:
        from ray._private.authentication.authentication_token_setup import (
            maybe_enable_token_auth_if_token_available as take_token,
        )

        logging.getLogger(take_token.__module__).setLevel(logging.ERROR)
        is_admitted = _admits(address)
        if not is_admitted and _MODE not in environ and take_token():
            is_admitted = _admits(address)
    except ImportError:  # a Ray that knows no tokens, or has them elsewhere
        return
    if not is_admitted:
        raise refused_token(f"the Ray cluster at {address}")


def _admits(address: str) -> bool:
    """Whether the Ray at `address` answers this process as its mode and token are now."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    from ray.exceptions import AuthenticationError

    messages: Any = gcs_service_pb2
    try:
        with init_grpc_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            nodes = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            nodes.GetClusterId(messages.GetClusterIdRequest(), timeout=PROBE_S)
    except AuthenticationError:
        return False
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return False
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED):
            raise DeviceError(
                f"what answers at {address} is no Ray cluster; name the address that `ray start "
                "--head` printed, by default HEAD:6379"
            ) from error
        # else it is slow or of another version, which `ray.init` knows better
    return True


def refused_token(cluster: str) -> DeviceError:
    """An error for a `cluster` that refused the token: where it came from, never the token."""
    path = token_file()
    if not _uses_tokens():
        sent = f"{_MODE}={environ[_MODE]} keeps one from being sent; unset that, and"
    elif path is None:
        sent = f"the one in {_TOKEN} is not its own;"
    elif _is_empty(path):
        named = f"{_PATH} names it" if environ.get(_PATH) else f"{_TOKEN} and {_PATH} are unset"
        sent = f"none was found: {path} is missing or empty, and {named};"
    else:
        why = f" ({_PATH})" if environ.get(_PATH) else ""
        sent = f"the one in {path}{why} is not its own;"
    return DeviceError(
        f"{cluster} wants its token, and {sent} copy the head's token file to here (mode 0600) and "
        f"set {_PATH} to it"
    )


def unreadable_token() -> str | None:
    """What is wrong with the place from which Ray takes the token here; None where nothing is."""
    path = token_file()
    if path is None or not _is_empty(path):
        return None
    named = f"{_PATH} names it" if environ.get(_PATH) else f"{_MODE} asks for one"
    return (
        f"its token cannot be read: {path} is missing or empty, and {named}; write one by `ray "
        f"get-auth-token --generate`, or unset {_PATH if environ.get(_PATH) else _MODE}"
    )


def _is_empty(path: Path) -> bool:
    try:
        return not path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return True
