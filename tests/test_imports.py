"""Which module may import which, which modules import no torch, and what no module may use."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanovllm"

# A name on the left may import the names on its right and what those may import; never the other way. A name covers
# all modules under it; the longest matching name counts.
RULE = """
__main__ -> cli -> server, bench -> nanovllm -> llm, remote
llm -> engine -> executor -> runner -> models
remote -> engine
models -> layers -> attention, weights -> kernels
runner -> checkpoint
executor, remote -> remote.transport
executor, layers -> distributed
server -> remote
llm, engine -> text -> checkpoint
server, engine -> structured -> text
models -> checkpoint
cli -> simulate -> bench
simulate -> remote.routing
cli -> bench.server_overhead -> server, bench
"""
# Every module may import these; they import only each other.
FOUNDATION = {
    "checks",
    "config",
    "option",
    "state",
    "structured_outputs",
    "layers.spec",
    "models.spec",
    "sampling_params",
    "outputs",
    "errors",
    "plan",
}
# Every module except the foundation may import these; they import only the foundation.
LEAVES = {"utils", "checkpoint.stored", "remote.routing", "remote.transport"}
# These modules of the engine package import only the foundation and each other.
CONTROL_PLANE = {
    "engine.consistency",
    "engine.guide",
    "engine.proposer",
    "engine.sequence",
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


def module_name(path: Path) -> str:
    """'engine.core' for nanovllm/engine/core.py, 'engine' for its __init__.py, 'nanovllm' for the root's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts) or "nanovllm"


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def place(module: str) -> str | None:
    """The name in the rule that covers the module."""
    known = ALLOWED.keys() | FOUNDATION | LEAVES
    parts = module.split(".")
    candidates = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in candidates if name in known), None)


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


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


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


# --- no process-wide state --------------------------------------------------------------------------------------------

# Module-level state that every engine of the process shares, and why it may be there.
ALLOWED_STATE = {
    "distributed.group.ALONE": "a group of one rank: it has no connection, and nothing in it changes",
    "executor.ray.SESSION": "counts the users of Ray's connection, of which a process has one",
    "kernels.compile_ahead._preparing": "a lock: Triton prepares itself once per process",
    "kernels.launch._recorder": "a context variable: seen only by the thread that sets it, which also resets it",
    "kernels.launch._compiled": "a cache of compiled kernels, which never change",
    "kernels.launch.loading_lock": "a lock: Triton's launchers are Python modules of one name, which all threads share",
    "kernels.device.usable": "a cache of a fact about the machine",
    "kernels.device.dependent_launch": "a cache of a fact about the machine",
    "kernels.device.gluon_usable": "a cache of a fact about the machine",
    "kernels.linear.tiled._device_limits": "a cache of a fact about the machine",
    "runner.device._HOLDERS": "counts the users of cuBLAS's workspaces, which torch keeps once per process",
    "server.openapi.document": "a cache of a document that never changes",
}
STATEFUL_TYPES = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "local"}
STATEFUL_TYPES |= {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "ContextVar", "Queue", "SimpleQueue"}
CONTAINER_TYPES = {"dict", "list", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"}
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MUTATORS = {"append", "extend", "insert", "remove", "pop", "popitem", "popleft", "appendleft", "clear", "add"}
MUTATORS |= {"discard", "update", "setdefault", "sort", "reverse", "difference_update", "intersection_update"}
CACHES = {"cache", "lru_cache"}
IMMUTABLE_BASES = {"NamedTuple", "Enum", "IntEnum", "StrEnum"}


def last_name(node: ast.expr) -> str:
    """'Lock' for threading.Lock, Lock and threading.Lock()."""
    return dotted(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def stateful_classes(trees: dict[str, ast.Module]) -> set[str]:
    """Names of the package's classes whose instances can change."""
    found = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
                frozen |= any(keyword.arg == "frozen" for keyword in node.keywords)
                if not frozen and not IMMUTABLE_BASES & {last_name(base) for base in node.bases}:
                    found.add(node.name)
    return found


def assigned_names(node: ast.stmt) -> tuple[list[str], ast.expr | None]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)], node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id], node.value
    return [], None


def mutated_names(tree: ast.Module, module: str, modules: set[str]) -> set[str]:
    """'module.NAME' of the module-level names that this module changes, its own or imported ones."""
    origin = {name: f"{module}.{name}" for node in tree.body for name in assigned_names(node)[0]}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            source = our_module(node.module, modules)
            origin |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
    found = set()

    def note(node: ast.expr) -> None:
        if isinstance(node, ast.Name) and node.id in origin:
            found.add(origin[node.id])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # of an imported module
            found.add(f"{origin.get(node.value.id, '?').replace('nanovllm.', '')}.{node.attr}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            note(node.func.value)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            note(node.value)
        elif isinstance(node, ast.AugAssign) and node not in tree.body:
            note(node.target)
    return found


def module_state(sources: dict[str, str]) -> set[str]:
    """'module.NAME' of all that a process has once and that can change: locks, weak sets, context variables, instances
    of mutable classes, caches of functions, and containers that are changed anywhere or that begin empty."""
    trees = {module: ast.parse(source) for module, source in sources.items()}
    classes = stateful_classes(trees)
    mutated = set().union(*(mutated_names(tree, module, set(sources)) for module, tree in trees.items()))
    found = set()
    for module, tree in trees.items():
        for node in tree.body:
            names, value = assigned_names(node)
            if isinstance(value, CONTAINERS) or (isinstance(value, ast.Call) and last_name(value) in CONTAINER_TYPES):
                empty = ast.unparse(value) in ("{}", "[]") or (isinstance(value, ast.Call) and not value.args)
                found |= {f"{module}.{name}" for name in names if empty or f"{module}.{name}" in mutated}
            elif isinstance(value, ast.Call) and (last_name(value) in STATEFUL_TYPES or dotted(value.func) in classes):
                found |= {f"{module}.{name}" for name in names}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and CACHES & set(map(last_name, node.decorator_list)):
                found.add(f"{module}.{node.name}")
    return found


def test_nothing_is_process_wide_state() -> None:
    found = module_state({module: path.read_text() for module, path in SOURCES.items()})
    new = sorted(found - ALLOWED_STATE.keys())
    assert not new, f"process-wide state: {', '.join(new)}; pass it, or let the engine own it"
    gone = sorted(ALLOWED_STATE.keys() - found)
    assert not gone, f"in ALLOWED_STATE, but no longer in the package: {', '.join(gone)}"


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("x = {}", ["x"]),
        ("x: dict[str, int] = {'a': 1}", []),
        ("x = {'a': 1}\ndef f():\n    x['b'] = 2", ["x"]),
        ("x = [1]\ndef f():\n    x.append(2)", ["x"]),
        ("x = [1]\ndef f():\n    y = []\n    y.append(x[0])", []),
        ("x = {1}\ndef f():\n    global x\n    x |= {2}", ["x"]),
        ("import threading\nx = threading.Lock()", ["x"]),
        ("from weakref import WeakSet\nx: WeakSet[int] = WeakSet()", ["x"]),
        ("from contextvars import ContextVar\nx = ContextVar('x')", ["x"]),
        ("import functools\n@functools.lru_cache(maxsize=1)\ndef f(): ...", ["f"]),
        ("from functools import cache\nclass A:\n    @cache\n    def f(self): ...", ["f"]),
        ("class A: ...\nx = A()", ["x"]),
        ("@dataclass(frozen=True)\nclass A: ...\nx = A()", []),
        ("class A(NamedTuple): ...\nx = A()", []),
        ("import re\nx = re.compile('a')\ny = (1, 2)\nz = frozenset({1})", []),
        ("class A:\n    def f(self):\n        self.x = {}\n        self.x['a'] = 1", []),
    ],
)
def test_checker_sees_process_wide_state(source: str, state: list[str]) -> None:
    assert module_state({"m": source}) == {f"m.{name}" for name in state}


def test_checker_sees_state_that_another_module_changes() -> None:
    sources = {"a": "x = {'k': 1}\ny = {'k': 1}", "b": "from nanovllm.a import x\nx['l'] = 2"}
    assert module_state(sources) == {"a.x"}
    sources["b"] = "from nanovllm import a\ndef f():\n    a.y.clear()"
    assert module_state(sources) == {"a.y"}


# Functions that change a setting of the whole process.
SETTERS = {"signal.signal", "os.putenv", "os.chdir", "os.umask", "sys.setrecursionlimit", "atexit.register"}
SETTERS |= {"os.environ.setdefault", "os.environ.update", "os.environ.pop", "locale.setlocale", "random.seed"}
SETTERS |= {"gc.freeze", "gc.unfreeze", "gc.disable", "gc.enable", "gc.set_threshold", "torch.manual_seed"}
SETTERS |= {"torch.set_num_threads", "torch.set_default_dtype", "torch.set_default_device", "warnings.simplefilter"}
# Modules that call them, and why they may.
ALLOWED_SETTERS = {
    "bench.compare_transformers": "a program of its own",
    "cli.chat": "a program of its own",
    "executor.head_start": "a variable of the CUDA driver, which torch sets to the same value",
    "executor.interrupts": "restores the handler at the end of a block",
    "executor.worker": "a process of its own",
    "server.lifecycle": "a program of its own",
    "utils.child_process": "a process of its own",
    "utils.collector": "Python has one garbage collector; within a block its settings are restored",
}


def calls_setter(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and dotted(node.func) in SETTERS:
            return True
        if (
            isinstance(node, ast.Subscript)
            and not isinstance(node.ctx, ast.Load)
            and dotted(node.value) == "os.environ"
        ):
            return True
    return False


def test_settings_of_the_process_are_changed_only_where_allowed() -> None:
    assert {module for module, path in SOURCES.items() if calls_setter(path.read_text())} == ALLOWED_SETTERS.keys()


@pytest.mark.parametrize("line", ["os.environ['A'] = '1'", "del os.environ['A']", "gc.freeze()", "signal.signal(2, f)"])
def test_checker_sees_changed_settings(line: str) -> None:
    assert calls_setter(line)
    assert not calls_setter("x = os.environ['A']\nos.environ.get('A')\ngc.collect()")
