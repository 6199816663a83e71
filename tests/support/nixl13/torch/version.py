# SPDX-License-Identifier: Apache-2.0
"""As a torch for CPUs says it."""

cuda = None
