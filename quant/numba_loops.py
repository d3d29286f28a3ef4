"""Compiling loops with numba, where it is installed."""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quant.kept_loops import keep_compiled

_FAST_SUMS = {"reassoc", "contract", "nsz"}
"""Allows sums in any order, but keeps the meaning of NaN and infinity, which the sampler checks."""

_one_at_a_time = threading.Lock()


@cache
def has_numba() -> bool:
    found = find_spec("numba") is not None
    if not found:
        logging.getLogger(__name__).warning(
            "computing on this CPU is several times slower without numba: pip install numba"
        )
    return found


@contextmanager
def torch_threads() -> Iterator[None]:
    """Let compiled loops use torch's threads. One thread at a time may enter numba's own pool."""
    import numba

    settings: Any = numba.config
    with _one_at_a_time:
        threads = torch.get_num_threads()
        numba.set_num_threads(min(threads, settings.NUMBA_NUM_THREADS))
        if torch.get_num_threads() != threads:  # the first call sets those of all loops
            torch.set_num_threads(threads)
        yield


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor on the host as a numpy array, 16-bit types as their bits."""
    array: npt.NDArray[Any] = (
        tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor
    ).numpy()
    return array


def compiled_loop(function: Any, parallel: bool, exact: bool = False) -> Any:
    """Compile a loop, or take it from what is kept; `exact`: every operation as written, so that
    torch's own operations give the same bits.
    """
    import numba
    from llvmlite import binding

    # for instructions that a loop names, which may come from disk with a loop that is called
    binding.initialize_native_asmparser()
    settings: Any = numba.config
    settings.THREADING_LAYER = _thread_pool()
    fast = False if exact else _FAST_SUMS
    # a division that raises where it is by zero is not done for several numbers at once
    options: Any = {"fastmath": fast, "nogil": True, "error_model": "numpy"}
    options["no_cfunc_wrapper"] = True  # which takes time to compile, and nobody calls from C
    return keep_compiled(numba.njit(parallel=parallel, **options)(function))


@cache
def _thread_pool() -> str:
    """The layer of numba's whose threads are those of torch, where it has them; else of its own,
    which sleep where they idle: waking them takes 50 to 150 microseconds, and torch's 3.

    numba's layer for OpenMP takes torch's, GNU's, if that is visible to all of the process.
    """
    with suppress(OSError, AttributeError, ImportError):
        ctypes.CDLL("libgomp.so.1")  # what the layer was linked against
        _ = ctypes.CDLL(None).GOMP_parallel
        importlib.import_module("numba.np.ufunc.omppool")
        return "omp"
    return "workqueue"


@cache
def matrix_at(dtype: torch.dtype) -> Any:
    """Compile the view of a matrix `(address, rows, columns)`, 16-bit types as their bits. Handing
    over an address takes less time than an array, which counts where a loop is short.
    """
    import numba
    from numba.core import types
    from numba.extending import intrinsic

    kinds, numbers = cast(Any, types), cast(Any, numba)  # without annotations
    whole = {torch.float32: types.float32, torch.uint8: types.uint8}
    kind = kinds.CPointer(whole.get(dtype, types.uint16))

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    pointer: Any = intrinsic(lambda context, address: (kind(types.int64), code))

    @numba.njit(inline="always")
    def matrix(address: int, rows: int, columns: int) -> Any:
        return numbers.carray(pointer(address), (rows, columns))

    return matrix


@cache
def widening(dtype: torch.dtype) -> Any:
    import numba
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    if dtype in (torch.float32, torch.int8):
        return numba.njit(lambda number: np.float32(number), inline="always")

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if dtype == torch.float16:
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        word = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())  # bfloat16: the upper half of a float32

    return intrinsic(lambda context, bits: (types.float32(types.uint16), code))


@cache
def narrowing(dtype: torch.dtype) -> Any:
    """Compile what `widening` undoes, to the nearest number, of a tie the even one."""
    import numba
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    if dtype == torch.float32:
        return numba.njit(lambda number: number, inline="always")
    word, half = ir.IntType(32), ir.IntType(16)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (number,) = arguments
        if dtype == torch.float16:
            return builder.bitcast(builder.fptrunc(number, ir.HalfType()), half)
        bits = builder.bitcast(number, word)  # bfloat16
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        up = builder.add(odd, ir.Constant(word, 0x7FFF))
        return builder.trunc(builder.lshr(builder.add(bits, up), ir.Constant(word, 16)), half)

    return intrinsic(lambda context, number: (types.uint16(types.float32), code))


@cache
def prefetching() -> Any:
    """Compile a fetch of a matrix's element to be read soon; it may lie beyond the matrix."""
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    helpers: Any = cgutils  # without annotations
    number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    to_read, in_second_level, data = (ir.Constant(number, each) for each in (0, 2, 1))

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        matrix, row, column = arguments
        type_ = signature.args[0]
        held = context.make_array(type_)(context, builder, matrix)
        place = helpers.get_item_pointer(
            context, builder, type_, held, [row, column], wraparound=False
        )
        fetch = helpers.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(fetch, [builder.bitcast(place, pointer), to_read, in_second_level, data])
        return context.get_dummy_value()

    return intrinsic(
        lambda context, matrix, row, column: (types.void(matrix, types.int64, types.int64), code)
    )
