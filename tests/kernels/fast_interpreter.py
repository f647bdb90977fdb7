"""Triton's interpreter without two things that took more than half of its time; what it computes is the same."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache  # once in a process
def speed_up() -> None:
    if not hasattr(interpreter, "_LangPatchScope"):  # of an older Triton, which works otherwise
        return
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # it computes whether integers overflow, and drops the result
        builder.options = replace(builder.options, sanitize_overflow=False)


def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A kernel runs with other functions in triton.language. The interpreter puts them there when it launches one, and
    again at each call of a helper, where they are already."""
    patched: set[frozenset[str]] = set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[str]:
        seen = function.__globals__.values()
        return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in seen))

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if modules in patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        patched.add(modules)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_once
