"""Arithmetic on subnormal float32, whatever the thread that calls has chosen.

A program may have a thread read and write them as zero (`torch.set_flush_denormal`). Where E4M3 comes out as
2^-120 of its value, its own subnormals would then be lost. x86 keeps the choice in a control word of the thread.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["keep_subnormals", "restore"]

_FLUSHING = 1 << 15 | 1 << 6
"""Results and operands that are subnormal count as zero."""

_I32 = ir.IntType(32)


@intrinsic  # type: ignore[untyped-decorator]
def keep_subnormals(_typing: Any) -> Any:
    """Returns the control word as it was, for `restore`; 0 on a machine that has none."""
    return types.uint32(), _write_keep


@intrinsic  # type: ignore[untyped-decorator]
def restore(_typing: Any, control: Any) -> Any:
    """Puts back what `keep_subnormals` has changed."""
    return types.void(control), _write_restore


def _write_keep(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
    if not _is_x86(context):
        return _I32(0)
    place = cgutils.alloca_once(builder, _I32)
    _control(builder, "stmxcsr", place)
    control = builder.load(place)
    builder.store(builder.and_(control, _I32(~_FLUSHING)), place)
    _control(builder, "ldmxcsr", place)
    return control


def _write_restore(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    if _is_x86(context):
        _control(builder, "ldmxcsr", cgutils.alloca_once_value(builder, args[0]))
    return context.get_dummy_value()


def _control(builder: Any, instruction: str, place: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{instruction}")
    builder.call(function, [builder.bitcast(place, pointer)])


def _is_x86(context: Any) -> bool:
    triple: str = context.codegen().magic_tuple()[0]
    return triple.startswith(("x86_64", "i686"))
