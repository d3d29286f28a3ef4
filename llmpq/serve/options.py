"""The options of serving: address, limits, where the key comes from, how many copies of a plan."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from planner.option_rules import ABOVE_0_S, AT_LEAST_0, AT_LEAST_1, Range, option, refuse_outside
from quant.common.errors import DeviceError, SpecError
from quant.common.loopback import MOST_PORT, is_of_this_machine

if TYPE_CHECKING:
    from planner.plan.spec import StagePlan

KEY_VARIABLE = "LLMPQ_API_KEY"
LEAST_KEY = 16
"""Characters of a key: fewer can be guessed by trying."""

FOLDER_SUFFIX = ".batches"
"""Ending of the folder of files and batches, beside a plan file."""

_ABOVE_0 = Range(lambda value: value > 0, "give a number above 0")


@dataclass(frozen=True)
class ServeOptions:
    """Address, key and limits of a server. `SpecError` for values out of range.

    `api_key` None admits everyone who reaches the address, which must then be of this machine
    alone. `served_model_names`: names by which clients may call the model, each once; empty for the
    engine's own.
    """

    host: str = option("ADDRESS", "to listen on, by itself for this machine alone", "127.0.0.1")
    port: int = option(
        "PORT",
        "to listen on, 0 for a free one",
        8000,
        within=Range(lambda port: 0 <= port <= MOST_PORT, f"give 1 to {MOST_PORT}, or 0 for any"),
    )
    api_key: str | None = field(default=None, repr=False)
    served_model_names: tuple[str, ...] = ()
    queue_limit: int = option("COUNT", "answers that may wait for a slot", 256, within=AT_LEAST_0)
    body_limit_bytes: int = option("BYTES", "most of a request", 4 << 20, within=AT_LEAST_1)
    body_s: float = option("SECONDS", "for a request to arrive", 30.0, within=ABOVE_0_S)
    connection_limit: int = option("COUNT", "open connections", 1024, within=AT_LEAST_1)
    stall_s: float = option(
        "SECONDS", "that a client may leave its answer unread", 60.0, within=ABOVE_0_S
    )
    drain_s: float = option(
        "SECONDS", "that running answers get to finish after SIGTERM", 60.0, within=AT_LEAST_0
    )
    retry_after_s: int = option(
        "SECONDS", "until clients may ask again when the queue was full", 1, within=AT_LEAST_0
    )

    def __post_init__(self) -> None:
        """Check ranges, and that nobody opens the model to a network without a key."""
        refuse_outside(self)
        _check_names(self.served_model_names)
        if self.api_key is not None:
            _check_key(self.api_key)
        elif not is_of_this_machine(self.host):
            raise SpecError(
                f"host {self.host!r} is open to other machines, and there is no key; set "
                f"{KEY_VARIABLE}, or serve on 127.0.0.1"
            )


@dataclass(frozen=True)
class BatchOptions:
    """Folder and limits of files and batches; raises `SpecError` for values out of range."""

    batch_dir: Path
    file_limit_mib: float = option(  # as OpenAI's
        "MIB", "most MiB of a file for a batch", 200.0, within=_ABOVE_0
    )
    batch_dir_limit_gib: float = option(
        "GIB", "most GiB of all files, beyond which none is taken", 10.0, within=_ABOVE_0
    )

    def __post_init__(self) -> None:
        refuse_outside(self)


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


def find_api_key(file: Path | None = None, variables: Mapping[str, str] = os.environ) -> str | None:
    """The key in `file`, else of the environment, else None; warns where others can read it."""
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


AUTO = "auto"

MOST_REPLICAS = 64
"""One server makes text of the tokens of them all."""


def parse_replicas(text: str) -> int | None:
    """The number of copies that `text` asks for; None for as many as have devices."""
    if text == AUTO:
        return None
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= MOST_REPLICAS:
        raise SpecError(f"--replicas is {text!r}; give 1 to {MOST_REPLICAS}, or {AUTO}")
    return count


def count_replicas(stages: Sequence[StagePlan], wanted: int | None) -> int:
    """Copies of `stages` to start; needs an initialised Ray.

    Raises `DeviceError` where devices for as many are not free, saying for how many they are. A
    single copy waits for its devices when it starts, and is not looked at here.
    """
    if wanted == 1:
        return 1
    import ray

    from actors.processes.placement import place
    from actors.processes.reservation import copies_granted

    placements = place(stages, ray.cluster_resources())
    if wanted is None and not any(each.bundle for each in placements):
        raise SpecError(
            f"--replicas {AUTO} counts devices that Ray knows, and this plan's are all emulated; "
            "give a number"
        )
    granted = copies_granted(placements, MOST_REPLICAS if wanted is None else wanted)
    if granted == 0 or (wanted is not None and granted < wanted):
        remedy = f"give --replicas {granted}, " if granted else ""
        raise DeviceError(
            f"--replicas {wanted or AUTO}: there are free devices for {granted} copies of the "
            f"plan, {len(stages)} each; {remedy}add nodes to the Ray cluster, or end what uses its "
            "devices"
        )
    return granted
