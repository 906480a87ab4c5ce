"""Memory of compiled grammars: its limits, and its return to the system.

A compiled grammar takes the memory that was measured when the sandbox compiled it, and up to 5 MiB more for the states
of its lexer, which grow during use. It lives as long as it is kept for later requests, or a request uses it.

Knows bytes, clients and the C library. Does not know texts of grammars or requests.
"""

import threading
import time
import weakref

from oarlock.base.process_memory import memory_use, trim
from oarlock.engine.structured_output.compiler import Compiled

MAX_BYTES = 256 << 20  # limit for all compiled grammars
MAX_CLIENT_BYTES = MAX_BYTES // 2  # limit for the grammars that one client asked for first
_TRIM_BYTES = 16 << 20  # freed bytes after which memory is returned to the system
_TRIM_AFTER_S = 0.5


def resident_bytes() -> int:
    """Return the resident bytes of this process, without file pages and memory that the C library can release."""
    trim()
    use = memory_use()
    return use.resident - use.of_files


class GrammarMemory:
    """Counts the compiled grammars that are alive. For one thread."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[Compiled] = weakref.WeakSet()
        self._num_freed = 0
        self._is_trimming = False

    def num_bytes(self, client: str | None = None) -> int:
        """Return the bytes of all grammars that are alive, or of the grammars that `client` asked for first."""
        return sum(grammar.num_bytes for grammar in self._live if client in (None, grammar.client))

    def has_room(self, compiled: Compiled) -> bool:
        """Return whether `compiled` fits into the limits. A single grammar always does."""
        own = self.num_bytes(compiled.client)
        fits = self.num_bytes() + compiled.num_bytes <= MAX_BYTES and own + compiled.num_bytes <= MAX_CLIENT_BYTES
        return fits or not self._live

    def add(self, compiled: Compiled) -> None:
        """Count `compiled` as long as it lives."""
        self._live.add(compiled)
        weakref.finalize(compiled, self._freed, compiled.num_bytes).atexit = False

    def _freed(self, num_bytes: int) -> None:
        self._num_freed += num_bytes
        if self._num_freed >= _TRIM_BYTES and not self._is_trimming:
            self._is_trimming, self._num_freed = True, 0
            threading.Thread(target=self._trim, name="grammar-trim", daemon=True).start()

    def _trim(self) -> None:
        """Return memory in a separate thread, after the last part of the grammar is free."""
        time.sleep(_TRIM_AFTER_S)
        self._is_trimming = False
        trim()
