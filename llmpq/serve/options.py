"""The options of serving, and where its key comes from."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from planner.option_rules import refuse_not_finite
from quant.common.errors import SpecError

KEY_VARIABLE = "LLMPQ_API_KEY"
LEAST_KEY = 16
"""Characters of a key: fewer can be guessed by trying."""

_MOST_PORT = 65_535


@dataclass(frozen=True)
class ServeOptions:
    """Address, key and limits of a server. `SpecError` for values out of range.

    `port` 0 takes a free one. `api_key` None admits everyone who reaches the address, which must
    then be of this machine alone. `served_model_names`: names by which clients may call the model,
    each once; empty for the engine's own. `queue_limit`: answers that may wait for a slot.
    `body_limit_bytes` and `body_s`: most bytes of a request, and seconds that it may take to
    arrive. `connection_limit`: open connections. `stall_s`: seconds that a client may leave its
    answer unread. `drain_s`: seconds that running answers get to finish after SIGTERM.
    `retry_after_s`: seconds after which clients may ask again when the queue was full.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    served_model_names: tuple[str, ...] = ()
    queue_limit: int = 256
    body_limit_bytes: int = 4 << 20
    body_s: float = 30.0
    connection_limit: int = 1024
    stall_s: float = 60.0
    drain_s: float = 60.0
    retry_after_s: int = 1

    def __post_init__(self) -> None:
        """Check ranges, and that nobody opens the model to a network without a key."""
        refuse_not_finite(self)
        least = {
            "port": 0,
            "queue_limit": 0,
            "body_limit_bytes": 1,
            "connection_limit": 1,
            "drain_s": 0,
            "retry_after_s": 0,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise SpecError(f"{name} is {getattr(self, name)!r}; give {bound} or more")
        for name in ("body_s", "stall_s"):
            if getattr(self, name) <= 0:
                raise SpecError(f"{name} is {getattr(self, name)!r}; give seconds above 0")
        if self.port > _MOST_PORT:
            raise SpecError(f"port is {self.port}; give 1 to {_MOST_PORT}, or 0 for any")
        _check_names(self.served_model_names)
        if self.api_key is not None:
            _check_key(self.api_key)
        elif not is_of_this_machine(self.host):
            raise SpecError(
                f"host {self.host!r} is open to other machines, and there is no key; set "
                f"{KEY_VARIABLE}, or serve on 127.0.0.1"
            )


def _check_names(names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if not name.strip() or not name.isprintable():
            raise SpecError(
                f"served_model_name is {name!a:.200}; give a name of printable characters, which "
                "clients can send, or leave it out for the plan's"
            )
        if name in names[:number]:
            raise SpecError(f"served_model_name has {name!r:.200} twice; give each name once")


def _check_key(key: str) -> None:
    if len(key) < LEAST_KEY or not (key.isascii() and key.isprintable() and " " not in key):
        raise SpecError(
            f"the API key must be at least {LEAST_KEY} ASCII characters without spaces; "
            "`openssl rand -hex 32` makes one"
        )


def is_of_this_machine(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def find_api_key(file: Path | None = None, variables: Mapping[str, str] = os.environ) -> str | None:
    """The key in `file`, else that of the environment; None where neither is.

    Raises `SpecError` for a file that cannot be read or is empty; warns where others can read it.
    """
    if file is None:
        return variables.get(KEY_VARIABLE) or None
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no ASCII text"
        raise SpecError(f"the API key file {file} cannot be read: {cause}") from error
    if not key:
        raise SpecError(f"the API key file {file} is empty; write the key into it")
    if mode & 0o077:
        warnings.warn(
            f"others can read the API key file {file} (mode {mode:04o}); close it with "
            f"`chmod 600 {file}`",
            stacklevel=2,
        )
    return key
