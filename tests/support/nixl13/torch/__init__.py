# SPDX-License-Identifier: Apache-2.0
"""Stands in for torch where the Python package of NIXL 1.3 is tested.

That version imports torch to ask whether what it was given is a tensor and for
which CUDA torch was built; 1.5 does not. Nothing of ours needs the real one,
which is a hundred times larger than NIXL.
"""


class Tensor:
    """No object is one."""
