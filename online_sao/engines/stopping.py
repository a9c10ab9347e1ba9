"""Stop strings in a stream: text is shown up to the first one, and never a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Give it text as it comes; it gives back what may be shown."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._pending = ""
        self.stopped = False

    def push(self, new: str, *, check: bool = True) -> str:
        """What may be shown now; sets `stopped` when a stop string is complete.

        Without `check` a complete stop string is text like any other.
        """
        self._pending += new
        if check:
            found = [at for at in map(self._pending.find, self._stop) if at >= 0]
            if found:
                self.stopped = True
                text, self._pending = self._pending[: min(found)], ""
                return text
        return self._release(len(self._pending) - self._begun())

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        return self._release(len(self._pending))

    def _release(self, count: int) -> str:
        text, self._pending = self._pending[:count], self._pending[count:]
        return text

    def _begun(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self._stop):
                return length
        return 0
