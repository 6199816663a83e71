# SPDX-License-Identifier: Apache-2.0
"""A writer that runs for long, among peers that die, and what it holds.

`run` is the command: it starts a writer for each engine, samples what the
kernel says of it (`proc`), and makes figures and a plot of that (`figures`,
`plots`). A writer is a process: `writer` paces it, `kvt_writer` and
`raw_writer` are what it writes with, and `peers` starts its targets out of a
process that forks them (`zygote`), so that a start costs little.
"""
