# SPDX-License-Identifier: Apache-2.0
"""What the tests of kvt.sglang share.

`arena` is memory with guard zones and an image of what it must be, `sides` are
transports of this process, `node` is a process with one transport, `nodes`
starts and drives it, and `vram` has the cases for which NIXL is a stand-in.
"""
