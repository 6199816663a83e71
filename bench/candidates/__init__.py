# SPDX-License-Identifier: Apache-2.0
"""The rivals, ourselves and the machine's limits.

A candidate is started once and then asked for figures by turns with others. It
is stopped (SIGSTOP, all of its processes) whenever it is not its turn: some
rivals spin on a core while they do nothing, and would take it from whoever is
timed.
"""
