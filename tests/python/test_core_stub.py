# SPDX-License-Identifier: Apache-2.0
"""The stub says what the extension has: the same names and parameters, and
everything public has a docstring."""

from __future__ import annotations

import ast
import importlib.resources
import inspect

import pytest

import kvt
from kvt import _kvt

PACKAGE = importlib.resources.files("kvt")
STUB = ast.parse((PACKAGE / "_kvt.pyi").read_text())
CLASSES = {
    node.name: node
    for node in STUB.body
    if isinstance(node, ast.ClassDef) and node.name != "Tensor"
}
FUNCTIONS = {
    node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)
}


def names_of(node: ast.ClassDef) -> set[str]:
    return {
        item.name for item in node.body if isinstance(item, ast.FunctionDef)
    }


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_the_module_has_what_the_stub_has() -> None:
    public = {name for name in vars(_kvt) if not name.startswith("_")}
    stub = {name for name in {*CLASSES, *FUNCTIONS} if name[0] != "_"}
    assert public == stub
    assert set(kvt.__all__) <= set(vars(kvt))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_what_the_stub_has(name: str) -> None:
    cls = getattr(_kvt, name)
    here = {item for item in vars(cls) if not item.startswith("__")}
    stub = {item for item in names_of(CLASSES[name]) if item[:2] != "__"}
    assert here == stub
    final = any(
        isinstance(item, ast.Name) and item.id == "final"
        for item in CLASSES[name].decorator_list
    )
    if final:
        with pytest.raises(TypeError):
            type("Sub", (cls,), {})


def parameters(node: ast.FunctionDef) -> list[str]:
    args = [arg.arg for arg in node.args.posonlyargs + node.args.args]
    return args + [arg.arg for arg in node.args.kwonlyargs]


@pytest.mark.parametrize("name", sorted(names_of(CLASSES["Transport"])))
def test_a_method_has_the_parameters_of_the_stub(name: str) -> None:
    if name.startswith("_"):
        pytest.skip("private")
    node = next(
        item
        for item in CLASSES["Transport"].body
        if isinstance(item, ast.FunctionDef) and item.name == name
    )
    member = getattr(_kvt.Transport, name)
    assert member.__doc__
    if callable(member):
        assert list(inspect.signature(member).parameters) == parameters(node)


def test_the_open_options_are_those_of_the_stub() -> None:
    init = next(
        item
        for item in CLASSES["Transport"].body
        if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    )
    signature = inspect.signature(_kvt.Transport)
    assert ["self", *signature.parameters] == parameters(init)


def test_everything_public_has_a_docstring() -> None:
    for name in kvt.__all__:
        member = getattr(kvt, name)
        if inspect.isclass(member) or inspect.isfunction(member):
            assert member.__doc__, name
