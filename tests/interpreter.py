"""Triton's interpreter without work that comes to nothing: kernels take half the time to the same values."""

import dataclasses
import functools
import inspect
from typing import Any

from triton import language
from triton.runtime import interpreter


@functools.cache
def _builtins(owner: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(owner) if language.core.is_builtin(member)]


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    """As Triton's own, which looks through the whole language at every call of a function by a kernel."""
    for name, member in _builtins(owner):
        if getattr(owner, name) is member:  # not yet
            interpreter._patch_attr(owner, name, member, builder, scope)


interpreter._patch_builtin = _patch_builtin
for owner in (language, language.tensor, language.math, language.core):
    _builtins(owner)  # as they are before the first kernel
_builder = interpreter.interpreter_builder
# else every sum is computed a second time in 64 bits, for an assertion that only debugging would make
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)
