"""Triton's interpreter without work that comes to nothing, and with products alike on every processor."""

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.runtime import interpreter


@functools.cache
def _builtins(owner: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(owner) if language.core.is_builtin(member)]


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    """As Triton's own, which looks through the whole language at every call of a function by a kernel."""
    found = _builtins(owner)
    if found and getattr(owner, found[0][0]) is found[0][1]:  # not yet: all of them or none
        for name, member in found:
            interpreter._patch_attr(owner, name, member, builder, scope)


@functools.cache
def _patch_lang(function: Any) -> Any:
    """Once for each function; Triton's own does and undoes it for each launch, of a class that all use."""
    _patch_lang_for(function)
    return interpreter._LangPatchScope()  # of nothing, to be restored


@functools.cache
def _block(*sizes: int) -> tuple[Any, int, str]:
    """What Triton checks and makes of the shape of a block, anew for each."""
    block = object.__new__(core.block_type)
    _init_block(block, core.int32, list(sizes))
    return block.shape, block.numel, str(block.shape)


@functools.cache
def _tensor(*sizes: int) -> tuple[Any, Any]:
    """What it makes of the shape of a tensor."""
    tensor = object.__new__(core.tensor)
    _init_tensor(tensor, None, core.block_type(core.int32, list(sizes)) if sizes else core.int32)
    return tensor.shape, tensor.numel


def _make_block(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
    self.shape, self.numel, text = _block(*sizes)
    self.name = f"<{text}, {element_ty}>"


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor(*type.shape) if type.is_block() else _tensor()


def _unwrap(value: Any) -> Any:
    if isinstance(value, core.constexpr):
        return value.value
    return value if isinstance(value, int | core.tensor | core.dtype) else _unwrap_any(value)


def _np_dtype(kind: Any) -> Any:
    kind = kind.scalar
    return _np_dtype_of(core.uint64 if isinstance(kind, core.pointer_type) else kind)


def _dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """A sum over the depth in its order, as on a GPU the same for each place in a block.

    A BLAS may sum an element of the last rows or columns in another order than it does elsewhere.
    """
    left, right = (_values(operand).astype(d.data.dtype) for operand in (a, b))
    total = np.zeros_like(d.data)
    part = np.empty_like(total)
    for k in range(left.shape[-1]):
        np.multiply(left[..., k, None], right[..., k, None, :], out=part)
        np.add(total, part, out=total)
    return interpreter.TensorHandle(total + d.data, d.dtype.scalar)


def _values(operand: Any) -> Any:
    """As numbers; of bf16 the interpreter has the bits."""
    if operand.dtype.scalar != core.bfloat16:
        return operand.data
    return (operand.data.astype(np.uint32) << 16).view(np.float32)


def leave_out_fingerprints() -> None:
    """Of lanes, in this process: they have tests of their own, and are interpreted twice for a module."""
    from lockstep.train import grid

    grid.fingerprint_lane = lambda *given, **how: "left out"


interpreter._patch_builtin = _patch_builtin
_patch_lang_for, interpreter._patch_lang = interpreter._patch_lang, _patch_lang
interpreter.InterpreterBuilder.create_dot = _dot
for owner in (language, language.tensor, language.math, language.core):
    _builtins(owner)  # as they are before the first kernel
_init_block, core.block_type.__init__ = core.block_type.__init__, _make_block
_init_tensor, core.tensor.__init__ = core.tensor.__init__, _make_tensor
_unwrap_any, core._unwrap_if_constexpr = core._unwrap_if_constexpr, _unwrap
_np_dtype_of, interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype), _np_dtype
_builder = interpreter.interpreter_builder
# else every sum is computed a second time in 64 bits, for an assertion that only debugging would make
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)
