"""Vectors in compiled loops: numbers of `LANES` rows that are computed at once.

Compilers do not find this order in loops over columns, whose sums they would have to add up across
lanes, so that it is written down; each processor has instructions of its own width for it. While a
loop is compiled, arithmetic on a `Vector` emits instructions. It takes the part of a tensor, so
that the same functions compute with either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

LANES = 16
"""The widest vector of float32 (AVX-512)."""

_FUSED = ("contract",)


class Vector:
    """Numbers, or answers to a comparison, one in each lane."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def _of(self, value: Any) -> Vector:
        return Vector(self.builder, value)

    def _same(self, other: Any) -> Any:
        if isinstance(other, Vector):
            return other.value
        return self.value.type([other if self._is_whole else float(other)] * LANES)

    def __add__(self, other: Any) -> Vector:
        if self._is_whole:
            return self._of(self.builder.add(self.value, self._same(other)))
        return self._of(self.builder.fadd(self.value, self._same(other), flags=_FUSED))

    def __sub__(self, other: Any) -> Vector:
        return self._of(self.builder.fsub(self.value, self._same(other), flags=_FUSED))

    def __rsub__(self, other: Any) -> Vector:
        return self._of(self._same(other)) - self

    def __mul__(self, other: Any) -> Vector:
        return self._of(self.builder.fmul(self.value, self._same(other), flags=_FUSED))

    def __truediv__(self, other: Any) -> Vector:
        return self._of(self.builder.fdiv(self.value, self._same(other)))

    def __rtruediv__(self, other: Any) -> Vector:
        return self._of(self._same(other)) / self

    def __and__(self, other: Any) -> Vector:
        return self._of(self.builder.and_(self.value, self._same(other)))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Vector:
        return self._of(self.builder.fneg(self.value))

    def _compared(self, how: str, other: Any) -> Vector:
        return self._of(self.builder.fcmp_ordered(how, self.value, self._same(other)))

    def __gt__(self, other: Any) -> Vector:
        return self._compared(">", other)

    def __lt__(self, other: Any) -> Vector:
        return self._compared("<", other)

    def __le__(self, other: Any) -> Vector:
        return self._compared("<=", other)

    def where(self, condition: Vector, other: Any) -> Vector:
        return self._of(self.builder.select(condition.value, self.value, self._same(other)))

    def maximum(self, other: Any) -> Vector:
        return self._of(self._same(other)).where(self < other, self)

    def clamp(self, min: Any = None, max: Any = None) -> Vector:
        found = self if min is None else self.maximum(min)  # NaN stays
        return found if max is None else self._of(self._same(max)).where(found > max, found)

    def abs(self) -> Vector:
        return self._called("fabs")

    def round(self) -> Vector:
        return self._called("rint")

    def floor(self) -> Vector:
        return self._called("floor")

    def ceil(self) -> Vector:
        return self._called("ceil")

    def isfinite(self) -> Vector:
        return self.abs() < float("inf")

    def double(self) -> Vector:
        return self._of(self.builder.fpext(self.value, self._kind("DoubleType")))

    def float(self) -> Vector:
        kind = self._kind("FloatType")
        return self if self.value.type == kind else self._of(self.builder.fptrunc(self.value, kind))

    def bfloat16(self) -> Vector:
        """The nearest numbers that bfloat16 holds, still in float32."""
        bits = self.view(torch.int32)
        odd = self._of(self.builder.lshr(bits.value, bits._same(16))) & 1
        return ((bits + odd + 0x7FFF) & -0x10000).view(torch.float32)

    def view(self, dtype: torch.dtype) -> Vector:
        kind = self._kind("FloatType") if dtype == torch.float32 else self._whole
        return self._of(self.builder.bitcast(self.value, kind))

    def _called(self, name: str) -> Vector:
        kind = self.value.type
        width = "f64" if kind == self._kind("DoubleType") else "f32"
        function = _helpers().get_or_insert_function(
            self.builder.module, _function(kind), f"llvm.{name}.v{LANES}{width}"
        )
        return self._of(self.builder.call(function, [self.value]))

    @property
    def _is_whole(self) -> bool:
        return bool(self.value.type == self._whole)

    @property
    def _whole(self) -> Any:
        from llvmlite import ir

        return ir.VectorType(ir.IntType(32), LANES)

    def _kind(self, name: str) -> Any:
        from llvmlite import ir

        return ir.VectorType(getattr(ir, name)(), LANES)


Body = Callable[[Vector, Vector, Sequence[Vector]], Sequence[Vector]]
"""What is computed of a column: of its numbers, its weight and the sums before it, those after."""


class Columns:
    """Numbers `[columns, LANES]`, and a weight of each column, in a loop that is compiled."""

    def __init__(self, builder: Any, numbers: Any, weights: Any, count: Any) -> None:
        self._builder, self._count = builder, count
        self._numbers, self._weights = numbers, weights

    def replace(self, body: Callable[[Vector], Vector]) -> None:
        with _helpers().for_range(self._builder, self._count) as loop:
            number = _load(self._builder, self._numbers, loop.index)
            _store(body(number), self._numbers, loop.index)

    def sums(self, body: Body, first: Sequence[float]) -> list[Vector]:
        """Pass over all columns, from sums that are `first` in all lanes."""
        from llvmlite import ir

        helpers = _helpers()
        kind = ir.VectorType(ir.FloatType(), LANES)
        running = [helpers.alloca_once_value(self._builder, kind([each] * LANES)) for each in first]
        with helpers.for_range(self._builder, self._count) as loop:
            before = [Vector(self._builder, self._builder.load(each)) for each in running]
            weight = self._builder.load(self._builder.gep(self._weights, [loop.index]))
            number = _load(self._builder, self._numbers, loop.index)
            after = body(number, _everywhere(self._builder, weight), before)
            for each, place in zip(after, running, strict=True):
                self._builder.store(each.value, place)
        return [Vector(self._builder, self._builder.load(each)) for each in running]


def traced(compute: Callable[[Columns, Sequence[Vector]], Sequence[Vector]], given: int) -> Any:
    """Compile `compute` as `(numbers [columns, LANES], weights [columns], inputs [given, LANES],
    outputs [rows, LANES])`, arrays of float32; what it returns are the rows of `outputs`.
    """
    from numba.core import types
    from numba.extending import intrinsic

    kinds: Any = types  # without annotations

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, weights, inputs, outputs = (
            context.make_array(kind)(context, builder, each)
            for kind, each in zip(signature.args, arguments, strict=True)
        )
        row = context.get_value_type(kinds.intp)
        count = builder.extract_value(numbers.shape, 0)
        columns = Columns(builder, numbers.data, weights.data, count)
        found = compute(columns, [_load(builder, inputs.data, row(k)) for k in range(given)])
        for k, each in enumerate(found):
            _store(each, outputs.data, row(k))
        return context.get_dummy_value()

    return intrinsic(
        lambda context, numbers, weights, inputs, outputs: (
            kinds.void(numbers, weights, inputs, outputs),
            code,
        )
    )


def _function(kind: Any) -> Any:
    from llvmlite import ir

    return ir.FunctionType(kind, [kind])


def _helpers() -> Any:
    from numba.core import cgutils

    return cgutils


def _place(builder: Any, address: Any, row: Any, kind: Any) -> Any:
    """The address of a row of an array `[rows, LANES]`."""
    number = builder.mul(row, row.type(LANES))
    return builder.bitcast(builder.gep(address, [number]), kind.as_pointer())


def _load(builder: Any, address: Any, row: Any) -> Vector:
    from llvmlite import ir

    place = _place(builder, address, row, ir.VectorType(ir.FloatType(), LANES))
    found = builder.load(place)
    found.align = 4
    return Vector(builder, found)


def _store(vector: Vector, address: Any, row: Any) -> None:
    place = _place(vector.builder, address, row, vector.value.type)
    vector.builder.store(vector.value, place).align = 4


def _everywhere(builder: Any, number: Any) -> Vector:
    from llvmlite import ir

    whole = ir.IntType(32)
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(nothing, number, whole(0))
    every = ir.VectorType(whole, LANES)([0] * LANES)
    return Vector(builder, builder.shuffle_vector(first, nothing, every))
