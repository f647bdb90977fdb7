"""No module has process-wide state or changes a setting of the process, except where a reason is given."""

import ast

import pytest

from tests.package_source import SOURCES, dotted, our_module

# Module-level state that every engine of the process shares, and why it may be there.
ALLOWED_STATE = {
    "distributed.group.ALONE": "a group of one rank: it has no connection, and nothing in it changes",
    "executor.ray.SESSION": "counts the users of Ray's connection, of which a process has one",
    "kernels.compile_ahead._preparing": "a lock: Triton prepares itself once per process",
    "kernels.launch._recorder": "a context variable: seen only by the thread that sets it, which also resets it",
    "kernels.launch._compiled": "a cache of compiled kernels, which never change",
    "kernels.launch.loading_lock": "a lock: Triton's launchers are Python modules of one name, which all threads share",
    "kernels.device.usable": "a cache of a fact about the machine",
    "kernels.features.dependent_launch": "a cache of a fact about the machine",
    "kernels.features.gluon_usable": "a cache of a fact about the machine",
    "kernels.linear.at_once_tile.at_once_tile": "a cache of choices, each of which follows from its arguments",
    "kernels.linear.tiled._device_limits": "a cache of a fact about the machine",
    "kernels.linear.wide_tile.wide_tile": "a cache of choices, each of which follows from its arguments",
    "native.build.library": "a cache of a library, which the process loads once",
    "runner.gpu_memory._HOLDERS": "counts the users of cuBLAS's workspaces, which torch keeps once per process",
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
    "bench.compare_llamacpp": "a program of its own",
    "bench.compare_transformers": "a program of its own",
    "cli.chat": "a program of its own",
    "executor.head_start": "a variable of the CUDA driver, which torch sets to the same value",
    "executor.interrupts": "restores the handler at the end of a block",
    "executor.worker": "a process of its own",
    "utils.child_process": "a process of its own",
    "utils.frozen_objects": "Python has one garbage collector; undone when the engine is closed",
    "utils.short_pauses": "Python has one garbage collector; restored after a block, or in a process of its own",
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
