"""What ruff can't see: who imports whom, that every export is there, that the error tree is true, what importing costs.

The source is read, not run, wherever reading it is enough.
"""

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import diskbuf
from diskbuf import errors

ROOT = Path(__file__).resolve().parents[1]

# The house, from the ground up. A part may import parts of its own floor and of those below, without a cycle.
FLOORS = (
    {"errors", "options", "specs", "tree", "trajectories", "version"},
    {"plan", "resident_plan", "row_rules", "store"},
    {
        "arranging",
        "comparing",
        "copying",
        "episode_ends",
        "episode_index",
        "episode_table",
        "exchange",
        "inspection",
        "kept_settings",
        "maintenance",
        "merging",
        "readers",
        "replay_buffers",
        "scanning",
        "splitting",
        "statistics",
        "transfer",
        "upkeep",
    },
    {"agents", "bandits", "drivers", "environments", "metrics", "networks", "policies"},
    {"training"},
)
# Slow to import, optional, or both: imported where they are used.
HEAVY = {"gymnasium", "h5py", "keras", "matplotlib", "minari", "pandas", "ray", "tensorflow", "torch", "zarr"}
# A store holds no pickles and runs no code; an assert disappears under -O.
FORBIDDEN_IMPORTS = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}


class Import(NamedTuple):
    """One import of one module, as written in the source."""

    target: str
    line: int
    inside_function: bool
    only_for_types: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "diskbuf").rglob("*.py"))}
TOOLS = sorted((ROOT / "tools" / "diskbuf_tools").rglob("*.py"))
PARTS = sorted(name for name in MODULES if name != "diskbuf")


def imports_of(name: str) -> list[Import]:
    """All imports of a module; `from package import submodule` counts as an import of the submodule."""
    path = MODULES[name]
    found: list[Import] = []

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        base = package.rsplit(".", node.level - 1)[0] if node.level else ""
        source = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            submodule = f"{source}.{alias.name}"
            yield submodule if submodule in MODULES else source

    def visit(node: ast.AST, inside_function: bool, only_for_types: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.extend(Import(target, node.lineno, inside_function, only_for_types) for target in targets(node))
        inside_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            only_for_types = True
        for child in ast.iter_child_nodes(node):
            visit(child, inside_function, only_for_types)

    visit(ast.parse(path.read_text(), str(path)), inside_function=False, only_for_types=False)
    return found


def floor_of(name: str) -> int:
    part = name.split(".")[1]
    floors = [number for number, parts in enumerate(FLOORS) if part in parts]
    assert floors, f"{name} has no place in the house; give {part!r} a floor in FLOORS"
    return floors[0]


def in_fresh_interpreter(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("name", PARTS)
def test_imports_go_down(name: str) -> None:
    for item in imports_of(name):
        if item.target == "diskbuf":
            pytest.fail(f"{name}:{item.line} imports the package root; import the module that has the name")
        assert not item.target.startswith("diskbuf_tools"), f"{name}:{item.line} imports the command line"
        if item.target.startswith("diskbuf."):
            assert floor_of(item.target) <= floor_of(name), f"{name}:{item.line} imports {item.target}, from above"


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        name: {item.target for item in imports_of(name) if item.target in PARTS and not item.only_for_types} - {name}
        for name in PARTS
    }
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("name", MODULES)
def test_heavy_packages_are_imported_where_they_are_used(name: str) -> None:
    for item in imports_of(name):
        if item.target.split(".")[0] in HEAVY:
            assert item.inside_function or item.only_for_types, f"{name}:{item.line} imports {item.target} on import"


def test_only_tree_knows_optree() -> None:
    users = {name for name in MODULES for item in imports_of(name) if item.target.split(".")[0] == "optree"}
    assert users == {"diskbuf.tree"}


@pytest.mark.parametrize("path", [*MODULES.values(), *TOOLS], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_pickled_evaluated_or_asserted(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where} asserts; raise an error of diskbuf.errors"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not FORBIDDEN_IMPORTS.intersection(name.split(".")[0] for name in names), where
        if isinstance(node, ast.Call):
            assert not (isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS), where
            assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, where


def test_every_export_is_there() -> None:
    for name in diskbuf.__all__:
        assert getattr(diskbuf, name) is not None
        assert name in dir(diskbuf)


def test_every_export_is_where_the_table_says() -> None:
    for name, module in diskbuf._MODULES.items():
        exported, home = getattr(diskbuf, name), importlib.import_module(module)
        assert exported is home or exported is vars(home)[name]
        if inspect.isclass(exported) or inspect.isfunction(exported):
            assert exported.__module__ == module


def test_users_and_type_checkers_see_the_same_exports() -> None:
    seen_by_type_checkers: set[str] = set()
    for node in ast.walk(ast.parse(Path(diskbuf.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "diskbuf":
            seen_by_type_checkers.update(alias.name for alias in node.names)
    assert seen_by_type_checkers == set(diskbuf.__all__)
    assert set(diskbuf.__all__) == set(diskbuf._MODULES) | {"__version__"}
    assert diskbuf.__all__ == sorted(diskbuf.__all__)


def test_every_error_is_exported() -> None:
    names = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert names <= set(diskbuf.__all__)


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'diskbuf' has no attribute 'UniformReplyBuffer'"):
        _ = diskbuf.UniformReplyBuffer


def test_the_error_tree_is_drawn_as_it_is() -> None:
    drawn: dict[str, tuple[str, ...]] = {}
    ancestors: list[str] = []
    for branch, name, builtin in re.findall(r"^    ([│├└─ ]*)(\w+Error)(?: \((\w+)\))?", errors.__doc__, re.MULTILINE):
        depth = len(branch) // 4
        drawn[name] = tuple(base for base in (*ancestors[depth - 1 : depth], builtin) if base)
        ancestors[depth:] = [name]
    real = {
        name: tuple(base.__name__ for base in value.__bases__)
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.DiskbufError)
    }
    assert drawn == real | {"DiskbufError": ()}


def test_importing_diskbuf_costs_next_to_nothing() -> None:
    code = "import time; start = time.perf_counter(); import diskbuf; print(time.perf_counter() - start)"
    seconds = min(float(in_fresh_interpreter(code)) for _ in range(5))
    assert seconds < 0.1
    assert in_fresh_interpreter("import diskbuf, sys; print('numpy' in sys.modules)") == "False\n"


def test_no_module_imports_a_heavy_package_by_being_imported() -> None:
    code = f"""
import importlib, sys
for name in {PARTS!r}:
    importlib.import_module(name)
    found = {sorted(HEAVY)!r}
    for heavy in found:
        if heavy in sys.modules:
            print(name, "brings", heavy)
            sys.exit()
"""
    assert in_fresh_interpreter(code) == ""
