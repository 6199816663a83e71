# SPDX-License-Identifier: Apache-2.0
"""What the tests of kvt.vllm share: vLLM's own modules, and nodes to run them.

`stand_in` makes vLLM's pure Python modules importable without vLLM's
dependencies, `node` is a process with one vLLM node in it, and `nodes` starts
and drives it. `memory` is the block pool of a node, with guard zones.
"""
