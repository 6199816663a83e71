# SPDX-License-Identifier: Apache-2.0
"""Waits for the first import of NIXL, and gives it kvt.nixl instead.

kvt_nixl.pth imports this when an interpreter starts with KVT_NIXL=1. It stays
out of everything else: kvt, and numpy with it, is imported by nobody but a
program that imports NIXL.
"""

import sys

_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm")


class _Finder:
    """The first of sys.meta_path."""

    @staticmethod
    def find_spec(
        name: str, path: object = None, target: object = None
    ) -> object:
        if name not in _PACKAGES:
            return None
        try:
            import kvt.nixl  # noqa: F401  # which reads KVT_NIXL too
        except ImportError as error:
            # Not plain NIXL in silence: the program was told to run on kvt.
            raise ImportError(
                f"KVT_NIXL=1 puts kvt.nixl in NIXL's place, and it cannot be "
                f"imported: {error}"
            ) from error
        # None once kvt.nixl.uninstall() was called: others look for NIXL.
        found = sys.modules.get(name)
        return None if found is None else found.__spec__


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
