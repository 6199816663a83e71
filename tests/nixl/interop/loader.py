# SPDX-License-Identifier: Apache-2.0
"""What NIXL itself does with metadata: a plain agent loads it and takes it
back. One that dies is started again."""

from peers import Plain, Refused

# Each load leaves sockets behind, and an agent without descriptors refuses all.
LOADS_OF_ONE_AGENT = 100


class Loader:
    def __init__(self, place, name):
        """`name` is the agent's whose metadata it will be."""
        self.place = place
        self.name = name
        self.plain = None
        self.loads = 0
        self.known = {}

    def load(self, blob):
        """'loaded', 'refused', or 'crash'; 'crash after others' when a fresh
        agent does not die of it."""
        if blob not in self.known:
            result = self.attempt(blob)
            if result == "crash" and self.attempt(blob) != "crash":
                result = "crash after others"
            self.known[blob] = result
        return self.known[blob]

    def attempt(self, blob):
        if self.loads == LOADS_OF_ONE_AGENT:
            self.end()
        if self.plain is None:
            self.plain = Plain(self.place, "loader")
            self.loads = 0
        self.loads += 1
        try:
            return self.load_and_undo(blob)
        except AssertionError:
            self.plain.forget()
            self.plain = None
            return "crash"

    def load_and_undo(self, blob):
        try:
            self.plain.remove(self.plain.add(blob))
            return "loaded"
        except Refused:
            pass
        try:
            # Half a load would be in the next one's way.
            self.plain.remove(self.name)
        except Refused:
            pass
        return "refused"

    def end(self):
        if self.plain is not None:
            self.plain.kill()
        self.plain = None
