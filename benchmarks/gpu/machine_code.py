"""What the compiler made of kernels: registers, spills, and the instructions of their longest loop.

Instructions are read from machine code for compute capability 7.0 to 8.9, where each takes 16
bytes, says in its lowest bits what it does, and branches as `_loops` reads it.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

MATRIX, FLOAT, OTHER = "matrix", "multiply-adds", "other"
KNOWN_CAPABILITIES = range(70, 90)
_INSTRUCTION_BYTES = 16
_OPERATION_BITS = 0x1FF
_BRANCH = 0x947
_KNOWN = {0x23: FLOAT, 0x31: FLOAT, 0x36: MATRIX, 0x37: MATRIX, 0x3C: MATRIX}
"""Multiply-adds of float32 and of pairs of float16; matrix instructions on 7.0, of integers, and
from 7.5 on. Found by compiling a kernel that does nothing else."""


class Compiled(NamedTuple):
    """A kernel in an assembler's log."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compiled(log: str) -> Iterator[Compiled]:
    def number(pattern: str, entry: str) -> int:
        return sum(map(int, re.findall(pattern, entry)))

    for entry in log.split("Compiling entry function '")[1:]:
        patterns = (r"Used (\d+) registers", r"(\d+) bytes spill", r"(\d+) bytes smem")
        yield Compiled(entry.partition("'")[0], *(number(each, entry) for each in patterns))


def longest_loops(image: bytes) -> dict[str, Counter[str]]:
    """Instructions of the longest loop of each kernel in machine code, by what they do."""
    found = {}
    for name, code in _sections(image):
        if name.startswith(".text."):
            words = [each[0] for each in struct.iter_unpack("<QQ", code)]
            loop = max(_loops(code), key=len, default=range(0))
            kinds = (_KNOWN.get(words[place] & _OPERATION_BITS, OTHER) for place in loop)
            found[name.removeprefix(".text.")] = Counter(kinds)
    return found


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an ELF file's sections."""
    (offset,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, offset + i * size) for i in range(count)]
    first_name = headers[names][4]
    for header in headers:
        begin = first_name + header[0]
        name = image[begin : image.index(b"\0", begin)].decode()
        yield name, image[header[4] : header[4] + header[5]]


def _loops(code: bytes) -> Iterator[range]:
    """Places of instructions between a branch back and where it goes; one to itself ends code."""
    for place, (low, high) in enumerate(struct.iter_unpack("<QQ", code)):
        if low & 0xFFF == _BRANCH:
            distance = (low >> 34 | high << 30) & (1 << 48) - 1
            distance -= (distance >> 47) << 48
            target = place + 1 + 4 * distance // _INSTRUCTION_BYTES
            if 0 <= target < place:
                yield range(target, place + 1)
