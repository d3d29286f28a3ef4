"""Micro-batches for tests, whose requests hold equal ranges of the KV cache in slot order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.messages import Admission, MicroBatch

SLOT_TOKENS = 64


def batch_in_ranges(
    slots: npt.ArrayLike,
    starts: npt.ArrayLike,
    counts: npt.ArrayLike,
    admitted: Sequence[Admission] = (),
    slot_tokens: int = SLOT_TOKENS,
) -> MicroBatch:
    """A micro-batch in which slot i has `slot_tokens` token slots from `i * slot_tokens` on."""
    arrays = (np.asarray(each, dtype=np.int64) for each in (slots, starts, counts))
    own_slots, own_starts, own_counts = arrays
    begins = own_slots * slot_tokens
    return MicroBatch(own_slots, own_starts, own_counts, begins, tuple(admitted))
