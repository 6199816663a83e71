# SPDX-License-Identifier: Apache-2.0
"""kvt beside its rivals and the machine's limits, in one run.

`run` is the command, `rows` the table of the goals, `candidates` the rivals and
ourselves behind one interface, `node` the process in which one side of a
candidate lives, `jobs` what is timed there, `report` and `plots` what comes
out.
"""
