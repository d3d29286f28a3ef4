"""Decode attention by lengths: our kernel against float64, and its time against what a copy moves.

Every request has one new token. *unlike* lengths lie between a quarter of the length and all of it.
Each call reads other keys and values than the one before, so that they come from memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np
import torch
from torch import Tensor

from actors.attention.addresses import Addresses, Scoring
from actors.attention.cuda import range_attention, reference
from actors.attention.stored import SCALE_DTYPE, Stored
from actors.messages import MicroBatch, TokenIds
from benchmarks.gpu.findings import Findings, Place
from benchmarks.gpu.measurements.kernels import GB, replayed_seconds
from benchmarks.gpu.measurements.models import Recorder, release
from benchmarks.lab import EVICTING_BYTES, seconds_of
from benchmarks.speed.linear import Product, copy_bytes_per_s
from quant.common.errors import DeviceError

HEADS, HEAD_DIM = 32, 128
SCORING = Scoring(HEAD_DIM**-0.5)
REQUESTS, LENGTHS = (1, 8, 32, 128), (128, 1024, 8192)
MOST_COPIES, EAGER_CALLS, SAMPLES = 128, 20, 3
_ERRORS_IN_UNITS = 4.0
"""Relative error (Frobenius norm) that a right kernel stays below, in units of float16's `eps`."""


@dataclass(frozen=True)
class _Case:
    """So many requests with these `lengths`, in a cache of which each copy of them takes a part."""

    held: tuple[Stored, Stored]
    lengths: TokenIds
    copies: int

    def batch(self, copy: int) -> MicroBatch:
        ends = np.cumsum(self.lengths)
        begins = copy * ends[-1] + ends - self.lengths
        return MicroBatch(
            np.arange(len(ends)), self.lengths - 1, np.ones_like(self.lengths), begins
        )

    @property
    def moved_bytes(self) -> float:
        """Bytes of all keys and values, read once."""
        slots = self.held[0].numbers.shape[1]
        return float(sum(each.nbytes for each in self.held) / slots * self.lengths.sum())

    def ours(self, place: Place) -> list[Product]:
        """Our kernel; on a CPU the function that it is held against."""
        coded = self.held[0].scales is not None
        attention = range_attention(HEAD_DIM, torch.float16, coded, place.device)
        if attention is None and not place.dry_run:
            raise DeviceError("the kernel is not used here, as the log says")

        def over(where: Addresses) -> Product:
            if attention is None:
                held = self._read(slice(None))
                return lambda x: reference(x.double(), where.batch, SCORING, *held)
            return lambda x: attention.attend(x, where, SCORING, self.held)

        batches = map(self.batch, range(self.copies))
        return [over(Addresses.of(batch, place.device)) for batch in batches]

    def error(self, found: Tensor, query: Tensor) -> float:
        """Error of what was `found` for some requests, relative to float64."""
        rows = sorted({0, len(query) // 2, len(query) - 1})
        batch, wanted = self.batch(0), []
        for row in rows:
            begin, length = int(batch.begins[row]), int(self.lengths[row])
            alone = MicroBatch(*(np.array([n]) for n in (0, length - 1, 1, 0)))
            held = self._read(slice(begin, begin + length))
            wanted.append(reference(query[row : row + 1].double(), alone, SCORING, *held))
        expected = torch.cat(wanted)
        return float((found[rows].double() - expected).norm() / expected.norm())

    def _read(self, tokens: slice) -> tuple[Tensor, Tensor]:
        keys, values = (
            each.read(lambda part: part[:, tokens], torch.float64).double() for each in self.held
        )
        return keys, values


def run(findings: Findings, place: Place, _: str) -> None:
    """With heads of keys that queries share and without, in 16 and 8 bit."""
    copy_rate = copy_bytes_per_s(place.device)
    findings.note(f"a copy moves {copy_rate / GB:.0f} GB/s, bytes read and written")
    table = findings.table(
        "", kv_heads="{}", bits="{}", requests="{}", length="{}", lengths="{}",
        in_a_graph="{:.1f} us", GB_per_s="{:.0f}", of_copy="{:.0%}", eager="{:.1f} us",
        error="{:.4%}",
    )  # fmt: skip
    recorder = Recorder(findings, place.device)
    for kv_heads, bits in place.size(((8, 16), (8, 8), (HEADS, 16), (HEADS, 8)), ((8, 16), (8, 8))):
        release(place.device)
        what = f"attention over {kv_heads} heads of {bits}-bit keys"
        with torch.inference_mode(), findings.trying(what):
            for kind, case in _cases(kv_heads, bits, place):
                x = torch.randn(len(case.lengths), HEADS, HEAD_DIM, device=place.device).half()
                products = case.ours(place)
                error = case.error(products[0](x), x)
                eager_s = _eager_s(products, x)
                seconds = replayed_seconds(recorder, what, products, x, eager_s)
                rate = case.moved_bytes / (seconds or eager_s)
                findings.row(
                    table, kv_heads, bits, len(x), int(case.lengths.max()), kind,
                    seconds and seconds * 1e6, rate / GB, rate / copy_rate, eager_s * 1e6, error,
                )  # fmt: skip
                if not error <= _ERRORS_IN_UNITS * torch.finfo(x.dtype).eps:
                    findings.complain(f"{what} of {len(x)} requests is off by {error:.2%}")


def _cases(kv_heads: int, bits: int, place: Place) -> Iterator[tuple[str, _Case]]:
    """All that fit in a third of the free memory, the smallest first."""
    device, numbers = place.device, 2 * kv_heads * HEAD_DIM
    requests, lengths = place.size((REQUESTS, LENGTHS), ((3,), (50,)))
    slots = max(requests) * max(lengths)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        slots = min(slots, 8 * free_bytes // (3 * bits * numbers))
    held = _stored(slots, kv_heads, bits, device), _stored(slots, kv_heads, bits, device)
    draw = np.random.default_rng(0)
    for count, length in product(requests, lengths):
        if count * length > slots:
            continue
        copies = min(MOST_COPIES, slots // (count * length))
        copies = min(copies, -(-8 * EVICTING_BYTES // (bits * numbers * count * length)))
        yield "equal", _Case(held, np.full(count, length), copies)
        yield "unlike", _Case(held, draw.integers(length // 4, length + 1, count), copies)


def _stored(slots: int, kv_heads: int, bits: int, device: torch.device) -> Stored:
    size = kv_heads, slots, HEAD_DIM
    if bits == 16:
        return Stored(torch.randn(size, dtype=torch.float16, device=device))
    codes = torch.randint(-127, 128, size, dtype=torch.int8, device=device)
    return Stored(codes, torch.rand(size[:2], device=device).div_(64).to(SCALE_DTYPE))


def _eager_s(products: Sequence[Product], x: Tensor) -> float:
    """Seconds of a call, from an idle GPU on."""
    calls = products[:EAGER_CALLS]

    def work() -> None:
        for call in calls:
            call(x)

    work()
    return median(seconds_of(x.device, work) for _ in range(SAMPLES)) / len(calls)
