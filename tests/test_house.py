"""The house: imports go downward, every name has one home, and nothing grows beyond its budget."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "minigpt"
FLOORS = (  # a module may import those of its own floor and of the floors before it
    ("errors", "checks", "options"),
    ("network",),
    ("files",),
    ("text",),
    ("decoding",),
    ("prompts", "scoring", "interpret"),
    ("language_model",),
    ("loading",),
    ("parity", "jobs", "lines"),
    ("cli",),
    ("__main__",),
)
SKIP_AT_FIRST = ("products", "formats", "cuda_graph", "cuda_rows", "draft", "beams")  # of the core, in a first reading
CORE, WHOLE, FILE, FUNCTION = 2000, 8220, 300, 50  # lines, at most; WHOLE is to come down to 6700


def name_of(path: Path) -> str:
    """minigpt/network/model.py -> minigpt.network.model"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}
SCRIPTS = {path.name: ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / "scripts").rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name or "") of every import, those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in FILES else (node.module or "", alias.name)


def ours(tree: ast.AST) -> set[str]:
    """The modules of the package that it imports; `import minigpt` itself resolves names on their first use."""
    return {module for module, _ in imports(tree) if module in FILES and module != "minigpt"}


def floor(module: str) -> int:
    part = module.split(".")[1]
    return next(at for at, parts in enumerate(FLOORS) if part in parts)


def defined(tree: ast.AST) -> set[str]:
    """Every name that a module makes: functions, classes, variables, attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


DEFINED = {name: defined(tree) for name, tree in TREES.items()}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("module", [name for name in FILES if name != "minigpt"])
def test_imports_go_downward(module: str) -> None:
    wrong = {other for other in ours(TREES[module]) if floor(other) > floor(module)}
    assert not wrong


def test_no_circle() -> None:
    needs = {name: ours(tree) for name, tree in TREES.items()}
    while free := {name for name, others in needs.items() if not others & needs.keys()}:
        needs = {name: others for name, others in needs.items() if name not in free}
    assert not needs, "these import each other, or need one that does"


def test_text_needs_no_torch() -> None:
    """`text` uses files/reading and nothing else of the files."""
    seen, waiting = set(), {name for name in FILES if name.startswith("minigpt.text")}
    while waiting:
        seen.add(name := waiting.pop())
        assert not {module for module, _ in imports(TREES[name]) if module.split(".")[0] in ("torch", "safetensors")}
        waiting |= ours(TREES[name]) - seen
    assert {name for name in seen if name.startswith("minigpt.files")} <= {"minigpt.files", "minigpt.files.reading"}


def test_a_package_re_exports_nothing() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            [only] = ast.parse(path.read_text("utf-8")).body
            assert isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant), path


@pytest.mark.parametrize("user", [*TREES, *SCRIPTS])
def test_every_name_is_taken_from_its_home(user: str) -> None:
    wrong = {
        (module, name)
        for module, name in imports({**TREES, **SCRIPTS}[user])
        if module in FILES and module != "minigpt" and name and name not in DEFINED[module]
    }
    assert not wrong


@pytest.mark.parametrize("user", [*TREES, *SCRIPTS])
def test_no_private_name_is_used_outside_its_module(user: str) -> None:
    tree = {**TREES, **SCRIPTS}[user]
    elsewhere = {name for module, names in DEFINED.items() if module != user for name in names if private(name)}
    taken = {name for module, name in imports(tree) if module.startswith("minigpt") and private(name)}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not taken | used & elsewhere - defined(tree)


def test_the_command_line_starts_without_torch() -> None:
    for name in (name for name in FILES if name.startswith("minigpt.cli")):
        top = ast.Module([node for node in TREES[name].body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        assert not {module for module, _ in imports(top) if module.split(".")[0] == "torch"}, name
    code = (
        "import sys, minigpt.cli.main as cli\n"
        "for argv in (['--help'], ['generate', '--help'], ['--version']):\n"
        "    try: cli.main(argv)\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_sizes() -> None:
    lines = {name: len(path.read_text("utf-8").splitlines()) for name, path in FILES.items()}
    assert not {name: count for name, count in lines.items() if count > FILE}
    functions = {
        f"{name}.{node.name}": size
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (size := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION
    }
    assert not functions
    core = {
        name: count
        for name, count in lines.items()
        if name.split(".")[1:2] in (["network"], ["decoding"], ["language_model"])
        and name.split(".")[-1] not in SKIP_AT_FIRST
    }
    print(f"core {sum(core.values())}, package {sum(lines.values())} lines")
    assert sum(core.values()) <= CORE
    assert sum(lines.values()) <= WHOLE
