"""Files stay short enough to read at a sitting, and functions short enough to see at once."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 90
FILES = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is compiled by Triton or Gluon, which have no functions that return several results cheaply."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def long_functions(source: str) -> list[str]:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions if not is_kernel(f)}
    return [f"{name}() has {length} lines" for name, length in lengths.items() if length > MAX_FUNCTION_LINES]


@pytest.mark.parametrize("file", FILES)
def test_no_file_and_no_function_is_too_long(file: str) -> None:
    source = (ROOT / file).read_text()
    assert source.count("\n") <= MAX_FILE_LINES, f"{file} has {source.count(chr(10))} lines"
    assert not long_functions(source)


def test_checker_sees_what_is_too_long() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions(f"def f():\n{body}") and not long_functions(f"@triton.jit\ndef f():\n{body}")
