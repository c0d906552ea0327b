"""The shape of the package: imports point one way, and functions fit on a screen."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bothways"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 60
REASON = "Longer than 60 lines because"

# What each part may import of the package besides itself. Models and search meet in a step function, not in an import.
# What is not listed (the pipeline, the command line, the demo) calls the parts; none of them imports it.
MAY_IMPORT = {
    "text": {"errors", "tokens"},
    "data": {"errors", "config", "tokens", "text"},
    "kernels": {"tokens"},
    "nn": {"errors", "config", "tokens", "kernels", "stepwise"},
    "models": {"errors", "config", "tokens", "nn", "kernels", "stepwise"},
    "search": {"errors", "config", "tokens", "kernels", "stepwise"},
    "train": {"errors", "config", "tokens", "data", "models", "nn", "kernels"},
    "evaluate": {"errors", "tokens"},
}


def module_name(file: Path) -> str:
    """bothways/nn/__init__.py -> bothways.nn"""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in FILES}


def imported(source: str, module: str, is_package: bool, modules: set[str]) -> set[str]:
    """The modules among `modules` that this source names in an import, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import name` is an import of the module `name` where there is one, else of the package.
            names = [
                f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in modules else origin for alias in node.names
            ]
        else:
            continue
        found |= set(names) & modules
    return found - {module}


def graph() -> dict[str, set[str]]:
    return {
        name: imported(file.read_text(encoding="utf-8"), name, file.name == "__init__.py", set(MODULES))
        for name, file in MODULES.items()
    }


def part(module: str) -> str:
    """bothways.search.beam -> search"""
    return module.split(".")[1] if "." in module else ""


def long_functions(source: str) -> list[str]:
    """Functions of more than 60 lines that give no reason for it above them or in their docstring."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        above = first - 1
        while above > 0 and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        said = "\n".join(lines[above : first - 1]) + (ast.get_docstring(node) or "")
        if length > LONGEST and REASON not in said:
            found.append(f"{node.name} ({length} lines)")
    return found


def test_imports_have_no_cycle() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_part_imports_only_what_it_may(name: str) -> None:
    allowed = MAY_IMPORT[name] | {name}
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        if part(module) == name
        for other in sorted(others)
        if part(other) not in allowed
    ]
    assert wrong == []


def test_table_names_parts_that_exist() -> None:
    assert {name for name in MAY_IMPORT if not (PACKAGE / name / "__init__.py").exists()} == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_functions_fit_on_a_screen(file: Path) -> None:
    assert long_functions(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source, expected",
    [
        ("import p.b", {"p.b"}),
        ("from p import b", {"p.b"}),
        ("from p import load", {"p"}),
        ("from p.b import f", {"p.b"}),
        ("from . import b", {"p.b"}),
        ("from .b import f", {"p.b"}),
        ("def g():\n    from p.b import f", {"p.b"}),
        ("import torch\nfrom p.a import f", set()),
    ],
)
def test_imports_are_found(source: str, expected: set[str]) -> None:
    assert imported(source, "p.a", False, {"p", "p.a", "p.b"}) == expected


def test_long_functions_are_found() -> None:
    body = "    pass\n" * LONGEST
    assert long_functions(f"def f():\n{body}") == ["f (61 lines)"]
    assert long_functions(f"def f():\n{body[9:]}") == []
    assert long_functions(f"# {REASON} it is a table.\n@cache\ndef f():\n{body}") == []
    assert long_functions(f'def f():\n    """{REASON} it is a table."""\n{body}') == []
    assert long_functions(f"# {REASON} it is a table.\n\ndef f():\n{body}") == ["f (61 lines)"]
