# SPDX-License-Identifier: Apache-2.0
"""Puts this module in NIXL's place, and takes it out again.

What is put there are modules of their own with NIXL's names in them, so that
an import of a submodule that is not offered fails, and does not find a file of
ours under another name.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types

_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm")
_PARTS = ("_api", "_bindings", "logging")

_installed: dict[str, types.ModuleType] = {}


def install() -> None:
    """From now on `import nixl` finds this module, in this process.

    Under each name that NIXL's wheels have, with its submodules `_api`,
    `_bindings` and `logging`. RuntimeError if NIXL was imported already, since
    its users would go on with what they have. Once more does nothing.
    """
    if _installed:
        return
    names = [
        name
        for package in _PACKAGES
        for name in (package, *(f"{package}.{part}" for part in _PARTS))
    ]
    there = [name for name in names if name in sys.modules]
    if there:
        raise RuntimeError(
            f"{there[0]} is imported already: call kvt.nixl.install() before "
            "anything imports NIXL"
        )
    for package in _PACKAGES:
        _installed.update(_modules(package))
    sys.modules.update(_installed)


def uninstall() -> None:
    """Undoes install(). What was imported meanwhile keeps what it has."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()


def _modules(package: str) -> dict[str, types.ModuleType]:
    top = _module(package, is_package=True)
    made = {package: top}
    for part in _PARTS:
        ours = importlib.import_module(
            f"{__package__}.{'_log' if part == 'logging' else part}"
        )
        sub = _module(f"{package}.{part}")
        public = [name for name in vars(ours) if not name.startswith("_")]
        for name in getattr(ours, "__all__", public):
            value = getattr(ours, name)
            setattr(sub, name, value)
            setattr(top, name, value)
        if hasattr(ours, "__getattr__"):
            sub.__getattr__ = ours.__getattr__  # type: ignore[method-assign]
        setattr(top, part, sub)
        made[sub.__name__] = sub
    return made


class _Made:
    """Loads a module by having it: for the import in whose midst _kvt_nixl
    put the modules there, and for importlib.reload()."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def create_module(
        self, spec: importlib.machinery.ModuleSpec
    ) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """It is whole already."""


def _module(name: str, is_package: bool = False) -> types.ModuleType:
    module = types.ModuleType(name, f"NIXL's {name}, on kvt (kvt.nixl).")
    spec = importlib.machinery.ModuleSpec(
        name,
        _Made(module),  # type: ignore[arg-type]
        is_package=is_package,
    )
    module.__spec__ = spec
    if is_package:
        module.__path__ = []
    return module
