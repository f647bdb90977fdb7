"""Which module may import which, which modules import no torch, and what no module may use."""

import ast
import subprocess
import sys

import pytest

from tests.package_source import PACKAGE, SOURCES, dotted, imported_names, our_module

# A name on the left may import the names on its right and what those may import; never the other way. A name covers
# all modules under it; the longest matching name counts.
RULE = """
__main__ -> cli -> server, bench -> nanovllm -> llm, remote
llm -> engine -> executor -> runner -> models
remote -> engine
models -> layers -> attention, weights -> kernels, native
runner -> checkpoint
runner -> native.support -> models
runner -> native.formats -> native.support, native.weights
runner -> native.weights -> weights
native.weights -> native.blocks -> checkpoint.gguf_header
checkpoint -> checkpoint.gguf_header
executor, remote -> remote.transport
executor, layers -> distributed
server -> remote
llm, engine -> text -> checkpoint
server, engine -> structured -> text
models -> checkpoint -> checkpoint.packed -> checkpoint.reordered, checkpoint.text_part
weights -> checkpoint.packed
cli -> simulate -> bench
simulate -> remote.routing
cli -> bench.server_overhead -> server, bench
"""
# Every module may import these; they import only each other.
FOUNDATION = {
    "option_names",
    "config",
    "option",
    "state",
    "row_state",
    "structured_outputs",
    "value_lists",
    "checkpoint.names",
    "layers.division",
    "layers.moe_spec",
    "layers.part_spec",
    "layers.rope_spec",
    "layers.spec",
    "models.per_layer_spec",
    "models.scaled_rope",
    "models.scales",
    "models.spec",
    "weights.forms",
    "sampling_params",
    "outputs",
    "errors",
    "plan",
}
# Every module except the foundation may import these; they import only the foundation.
LEAVES = {"utils", "checkpoint.stored", "remote.routing", "remote.transport"}
# These modules of the engine package import only the foundation and each other.
CONTROL_PLANE = {
    "engine.checkpoints",
    "engine.consistency",
    "engine.extras",
    "engine.windows",
    "engine.guide",
    "engine.pacer",
    "engine.proposals",
    "engine.proposer",
    "engine.refusal",
    "engine.sequence",
    "engine.step_work",
    "engine.prefix",
    "engine.block_pool",
    "engine.block_manager",
    "engine.scheduler",
}
TORCH_FREE = FOUNDATION | CONTROL_PLANE | {"utils.hub", "utils.logging", "remote.routing", "simulate.runs"}

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BANNED_NAMES = {"torch.load", "torch.serialization", "torch.hub"}
BANNED_CALLS = {"eval", "exec"}


def parse_rule(text: str) -> dict[str, set[str]]:
    """For each name of the rule, all names that it may import, directly or through others."""
    allowed: dict[str, set[str]] = {}
    for line in text.strip().splitlines():
        groups = [[name.strip() for name in group.split(",")] for group in line.split("->")]
        for left, right in zip(groups, groups[1:], strict=False):
            for name in left:
                allowed.setdefault(name, set()).update(right)
        for name in groups[-1]:
            allowed.setdefault(name, set())
    for via in allowed:
        for name in allowed:
            if via in allowed[name]:
                allowed[name] |= allowed[via]
    return allowed


ALLOWED = parse_rule(RULE)


def place(module: str) -> str | None:
    """The name in the rule that covers the module."""
    known = ALLOWED.keys() | FOUNDATION | LEAVES
    parts = module.split(".")
    candidates = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in candidates if name in known), None)


def may_import(importer: str, imported: str) -> bool:
    if importer in CONTROL_PLANE:
        return imported in CONTROL_PLANE or place(imported) in FOUNDATION
    left, right = place(importer), place(imported)
    if left is None or right is None:
        return False
    if left == right or right in FOUNDATION:
        return True
    if left in FOUNDATION or left in LEAVES:
        return False
    return right in LEAVES or right in ALLOWED[left]


def forbidden_imports(source: str, module: str, is_package: bool, modules: set[str]) -> list[str]:
    tree = ast.parse(source)
    found = {our_module(name, modules) for name in imported_names(tree, module, is_package)}
    return sorted(name for name in found if name is not None and name != module and not may_import(module, name))


def banned_uses(source: str) -> list[str]:
    """Line and name of everything that no module may use: pickle in any form, code from text, `global`."""
    tree = ast.parse(source)
    found = []
    for name in imported_names(tree, "nanovllm", True):
        if name.split(".")[0] in BANNED_MODULES or any(f"{name}.".startswith(f"{bad}.") for bad in BANNED_NAMES):
            found.append(f"import of {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        elif isinstance(node, ast.Attribute) and dotted(node) in BANNED_NAMES:
            found.append(f"line {node.lineno}: {dotted(node)}")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                found.append(f"line {node.lineno}: {node.func.id}()")
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                found.append(f"line {node.lineno}: allow_pickle")
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_module_keeps_the_rule(module: str) -> None:
    path = SOURCES[module]
    assert place(module) is not None, f"nanovllm.{module} has no place in RULE: give it one"
    offences = forbidden_imports(path.read_text(), module, path.name == "__init__.py", set(SOURCES))
    assert not offences, f"nanovllm.{module} must not import {', '.join(offences)}"


@pytest.mark.parametrize("module", SOURCES)
def test_module_uses_nothing_banned(module: str) -> None:
    assert not banned_uses(SOURCES[module].read_text())


@pytest.mark.parametrize("module", sorted(TORCH_FREE & SOURCES.keys()))
def test_no_torch_is_named_where_none_belongs(module: str) -> None:
    tree = ast.parse(SOURCES[module].read_text())
    assert not [name for name in imported_names(tree, module, False) if name.split(".")[0] == "torch"]


def test_no_torch_is_loaded_by_front_door_and_control_plane() -> None:
    modules = ["nanovllm", *(f"nanovllm.{name}" for name in sorted(TORCH_FREE & SOURCES.keys()))]
    script = f"import sys\nimport {', '.join(modules)}\nsys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, check=False, cwd=PACKAGE.parent, timeout=60).returncode == 0


def test_import_is_quick() -> None:
    # Takes well under 0.1 s; the limit allows for a busy machine but not for torch, which needs a second.
    script = "import time\nbegin = time.perf_counter()\nimport nanovllm\nprint(time.perf_counter() - begin)"
    command = [sys.executable, "-c", script]
    runs = [subprocess.check_output(command, cwd=PACKAGE.parent, text=True, timeout=60) for _ in range(5)]
    assert min(map(float, runs)) < 0.25


def test_rule_has_no_way_back() -> None:
    assert not [name for name in ALLOWED if name in ALLOWED[name]]


MODULES = {"nanovllm", "llm", "config", "engine", "engine.core", "engine.scheduler", "executor.base", "runner.graphs"}
MODULES |= {
    "kernels.rope",
    "layers.linear",
    "models.llama",
    "models.spec",
    "checkpoint.loader",
    "utils.hub",
    "checkpoint.gguf",
}


@pytest.mark.parametrize(
    ("module", "source", "offences"),
    [
        ("kernels.rope", "from nanovllm.layers.linear import Linear", ["layers.linear"]),
        ("kernels.rope", "def f():\n    import nanovllm.llm", ["llm"]),
        ("engine.core", "from ..llm import LLM", ["llm"]),
        ("engine.core", "from .scheduler import Scheduler\nfrom nanovllm.executor import base", []),
        ("layers.linear", "from nanovllm.models.spec import ModelSpec", []),
        ("layers.linear", "from nanovllm.models.llama import Llama", ["models.llama"]),
        ("engine.scheduler", "from nanovllm.executor.base import Executor", ["executor.base"]),
        ("engine.scheduler", "from nanovllm.engine.core import Core", ["engine.core"]),
        ("engine.scheduler", "from nanovllm.config import SchedulerConfig\nimport torch", []),
        ("config", "from nanovllm.utils.hub import resolve_model", ["utils.hub"]),
        ("utils.hub", "from nanovllm.checkpoint.loader import load", ["checkpoint.loader"]),
        ("utils.hub", "from nanovllm.checkpoint import gguf", ["checkpoint.gguf"]),
        ("runner.graphs", "from nanovllm.checkpoint.loader import load", []),
        ("layers.linear", "from nanovllm.checkpoint.loader import load", ["checkpoint.loader"]),
        ("layers.linear", "from nanovllm import LLM", ["nanovllm"]),
        ("models.llama", "from nanovllm.layers.linear import Linear", []),
        ("checkpoint.gguf", "from nanovllm.models.llama import Llama", ["models.llama"]),
    ],
)
def test_checker_sees_forbidden_imports(module: str, source: str, offences: list[str]) -> None:
    assert forbidden_imports(source, module, is_package=False, modules=MODULES) == offences


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('x = 1')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "def f():\n    global x\n    x = 1",
    ],
)
def test_checker_sees_banned_uses(source: str) -> None:
    assert banned_uses(source)


def test_checker_lets_harmless_namesakes_pass() -> None:
    assert not banned_uses("model.eval()\nimport json\njson.load(file)\nfrom torch import nn\nloader.exec()")


# --- no circle of imports ---------------------------------------------------------------------------------------------


def without_type_checking(tree: ast.AST) -> ast.AST:
    """The tree without the bodies of `if TYPE_CHECKING:`, which never run."""

    class Remover(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST:
            if dotted(node.test).split(".")[-1] == "TYPE_CHECKING":
                node.body = [ast.Pass()]
            return self.generic_visit(node)

    return Remover().visit(tree)


def import_graph(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """For each module the modules it imports, also inside functions. `sources`: text, and whether it is a package."""
    graph = {}
    for module, (source, is_package) in sources.items():
        names = imported_names(without_type_checking(ast.parse(source)), module, is_package)
        graph[module] = {found for name in names if (found := our_module(name, set(sources))) is not None} - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One circle of imports for each set of modules that reach one another, in the order of the imports."""
    reachable = {module: reached(graph, module) for module in graph}
    found = {frozenset(m for m in reachable[module] if module in reachable[m]) for module in graph}
    return [a_circle(graph, group) for group in sorted(found - {frozenset()}, key=sorted)]


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    new = set(graph[start])
    while new:
        found |= new
        new = {other for module in new for other in graph[module]} - found
    return found


def a_circle(graph: dict[str, set[str]], group: frozenset[str]) -> list[str]:
    path = [min(group)]
    while path[-1] not in path[:-1]:
        path.append(min(graph[path[-1]] & group, key=lambda module: (module != path[0], module)))
    return path[path.index(path[-1]) :]


def test_no_circle_of_imports() -> None:
    sources = {module: (path.read_text(), path.name == "__init__.py") for module, path in SOURCES.items()}
    found = circles(import_graph(sources))
    assert not found, "; ".join(" -> ".join(circle) for circle in found)


def test_checker_sees_circles() -> None:
    plain = {
        "a": "from nanovllm.b import x",
        "b": "def f():\n    from nanovllm import c",
        "c": "import nanovllm.a",
        "d": "from nanovllm.a import y",
        "nanovllm": "",
    }
    assert circles(import_graph({name: (text, False) for name, text in plain.items()})) == [["a", "b", "c", "a"]]
    plain["c"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nanovllm.a"
    assert circles(import_graph({name: (text, False) for name, text in plain.items()})) == []
