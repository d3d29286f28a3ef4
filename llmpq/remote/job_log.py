"""The log of a Ray job, written as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

QUIET_S = 150.0
"""Seconds without log after which a connection counts as dead; a run writes a line a minute."""


class JobLog:
    """The log of a job, of which each character is written once."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write = write
        self._written = 0

    async def tail(self, client: JobSubmissionClient, job_id: str) -> None:
        """Write what is new; every connection begins at the log's first character.

        Raises `TimeoutError` when nothing came for `QUIET_S`.
        """
        seen = 0
        async with asyncio.timeout(QUIET_S) as limit:
            async for text in client.tail_job_logs(job_id):
                limit.reschedule(asyncio.get_running_loop().time() + QUIET_S)
                self._take(text, seen)
                seen += len(text)

    def catch_up(self, whole: str) -> None:
        """Write what is new of the whole log."""
        self._take(whole, 0)

    def _take(self, text: str, begin: int) -> None:
        new = text[max(0, self._written - begin) :]
        if new:
            self._written = begin + len(text)
            self._write(new)
