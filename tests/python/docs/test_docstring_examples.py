"""The docstring of every public class has an example that fits the package's own names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

import pycomm

pytestmark = pytest.mark.ci

PACKAGE = ROOT / "pycomm"
EXCEPTION = re.compile(r"\w+Error$")
WITH_EXAMPLE_FOR_ALL = "PycommError"
"""The other exceptions are caught alike; their docstrings are rows of docs/errors.md."""
OURS = re.compile(r"pycomm(\.\w+)+")
RECORDS = dict.fromkeys(("stats", "record", "took", "bucket")) | {"one": pycomm.OperationRecord}
"""Variables of examples, and the class whose fields they have; None: the class of the example."""


def public_names() -> set[str]:
    """All names in an __all__ of a public module, also of modules whose library is missing here."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        if any(part.startswith("_") and part != "__init__.py" for part in parts):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found.update(ast.literal_eval(node.value))
    return found


def public_classes() -> Iterator[tuple[str, Path, str]]:
    public = public_names()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name not in public:
                continue
            if not EXCEPTION.match(node.name) or node.name == WITH_EXAMPLE_FOR_ALL:
                yield node.name, path, ast.get_docstring(node) or ""


CLASSES = {name: (path, text) for name, path, text in public_classes()}


def example(docstring: str) -> str:
    """The indented lines below "Example::"."""
    found = re.search(r"^Example::\n\n((?:    .*\n?|\n)+)", docstring, re.M)
    assert found, "no example"
    return textwrap.dedent(found[1])


def test_the_classes_are_found() -> None:
    assert {"DistributedDataParallel", "Options", "DiLoCo", "PycommError", "Step"} <= set(CLASSES)
    assert len(CLASSES) >= 24


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_has_an_example_of_today(name: str) -> None:
    path, text = CLASSES[name]
    tree = ast.parse(example(text))  # that it is Python
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and OURS.fullmatch(ast.unparse(node)):
            named(ast.unparse(node))
        if isinstance(node, ast.Call) and OURS.fullmatch(ast.unparse(node.func)):
            check_keywords(named(ast.unparse(node.func)), [one.arg for one in node.keywords])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in RECORDS:
            module = importlib.import_module(module_of(path))
            record = RECORDS[ast.unparse(node.value)] or getattr(module, name)
            assert node.attr in {*dir(record), *record.__annotations__}, ast.unparse(node)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def named(dotted: str) -> Any:
    """The object that "pycomm.a.b" names; a test fails if there is none."""
    found: Any = pycomm
    for part in dotted.split(".")[1:]:
        if not hasattr(found, part) and found is pycomm:
            importlib.import_module(f"pycomm.{part}")
        found = getattr(found, part)
    return found


def check_keywords(called: Any, keywords: list[str | None]) -> None:
    parameters = inspect.signature(called).parameters
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        assert set(keywords) <= set(parameters), (called, keywords)
