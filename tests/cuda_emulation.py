"""CUDA sources compiled for the CPU, behind an emulator of blocks, warps and their barriers."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quant.backends.cuda.driver import (
    CudaError,
    Kernels,
    Source,
    compile_cuda,
    nvrtc_library,
    text_of,
)
from tests.made_once import made_once

EMULATOR = Path(__file__).with_name("cuda_emulator.cpp")
HEADER = EMULATOR.with_suffix(".h")
CPU = torch.device("cpu")


def address_sanitizer_is_loaded() -> bool:
    return "libasan" in os.environ.get("LD_PRELOAD", "")


def _has_nvrtc() -> bool:
    """Whether it can be loaded; with the address sanitizer it does not find its own files."""
    try:
        return bool(nvrtc_library()) and not address_sanitizer_is_loaded()
    except CudaError:
        return False


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="NVRTC is not installed")


@functools.cache
def emulated(
    source: Source, names: tuple[str, ...], sanitized: bool = False, **definitions: int
) -> Kernels:
    """The kernels of `source`, compiled once a process; with the undefined-behaviour sanitizer,
    which ends the process, if `sanitized`, and with the address sanitizer too where that is loaded.
    """
    command = [*_compiler(sanitized), "-shared", "-include", str(_header(sanitized))]
    command += [f"-D{name}={value}" for name, value in definitions.items()]
    command.append(f"-DKERNELS={' '.join(f'KERNEL({name})' for name in names)}")
    code = text_of(source)

    def compiled(library: Path) -> None:
        text = library.with_suffix(".cu")
        text.write_text(code)
        files = [f'-DSOURCE="{text}"', "-o", str(library), str(EMULATOR)]
        subprocess.run([*command, *files], check=True)

    library = made_once(f"{command} {EMULATOR.read_text()} {code}", ".so", compiled)
    return Kernels.load(ctypes.CDLL(str(library)), b"image", names, CPU)


def _compiler(sanitized: bool) -> list[str]:
    command = ["g++", "-std=c++17", "-O1", "-fPIC"]
    command.append("-fno-gnu-unique")  # the shared memory of one library is not another's
    if sanitized or address_sanitizer_is_loaded():
        command += ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    if address_sanitizer_is_loaded():
        command.append("-fsanitize=address")
    return command


def _header(sanitized: bool) -> Path:
    """The emulator's header in a folder where it is compiled too, which the compiler then reads."""
    text, command = HEADER.read_text(), [*_compiler(sanitized), "-x", "c++-header"]

    def compiled(header: Path) -> None:
        subprocess.run([*command, str(HEADER), "-o", str(header)], check=True)

    return made_once(f"{command} {text}", ".h.gch", compiled).with_suffix("")


_FRAME_SIZE = b"\x04\x11\x08\x00"
"""Before a kernel's number and the bytes of its stack in machine code (EIATTR_FRAME_SIZE)."""


def frame_bytes(image: bytes) -> list[int]:
    """Bytes of the stack of each kernel and function: zero where no register is spilled."""
    found = (each.start() for each in re.finditer(re.escape(_FRAME_SIZE), image))
    places = [at + 8 for at in found if at % 4 == 0]  # code may have the same bytes
    return [int.from_bytes(image[at : at + 4], "little") for at in places]


def check_machine_code(
    source: Source, names: Sequence[str], capability: tuple[int, int], **definitions: int
) -> None:
    """Check that every kernel compiles for the GPU without spills; skips the test where this NVRTC,
    older than the GPU, makes no machine code for it.
    """
    image = compile_cuda(text_of(source), capability, definitions)
    if not image.startswith(b"\x7fELF"):
        pytest.skip(f"this NVRTC is older than compute capability {capability[0]}.{capability[1]}")
    frames = frame_bytes(image)
    assert len(frames) >= len(names)  # and functions that they call
    assert not any(frames)
    for name in names:
        assert b".text." + name.encode() in image


def environment_with_address_sanitizer() -> dict[str, str]:
    """Variables for a process of which every allocation, torch's tensors too, has an end that
    emulated kernels cannot pass unnoticed.
    """
    command = ["g++", "-print-file-name=libasan.so"]
    library = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
