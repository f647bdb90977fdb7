"""The package's modules, and the names that a source text imports and uses."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nanovllm"


def module_name(path: Path) -> str:
    """'engine.core' for nanovllm/engine/core.py, 'engine' for its __init__.py, 'nanovllm' for the root's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts) or "nanovllm"


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_names(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Full dotted names of all imports, also those inside functions: 'torch.nn', 'nanovllm.engine.core.Core'."""
    package = ["nanovllm", *module.split(".")] if module != "nanovllm" else ["nanovllm"]
    if not is_package:
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = [*base, node.module] if node.module else base
            yield from (".".join([*source, alias.name]) for alias in node.names)


def our_module(name: str, modules: set[str]) -> str | None:
    """The nanovllm module that a full dotted name belongs to; None for other packages."""
    if name.split(".")[0] != "nanovllm":
        return None
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in modules:
        parts.pop()
    return ".".join(parts) or "nanovllm"


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"
