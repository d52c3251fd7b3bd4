"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from dcprt.errors import RequestError


class StopMatcher:
    """Passes text on until a stop string appears; nothing of a stop string is ever passed on.

    The stop string that is complete first counts; of two that end at the same character, the longer. The
    outcome does not depend on how the text is cut into pieces.

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise RequestError("A stop string must not be empty.", param="stop")
        self._progress = [_Progress(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matched

    def push(self, text: str) -> str:
        """Text that can no longer be part of a stop string; after a match, nothing."""
        if self._matched is not None:
            return ""
        if not self._progress:
            return text
        for at, character in enumerate(text):
            complete = [p.stop for p in self._progress if p.step(character)]
            if complete:
                self._matched = max(complete, key=len)
                before = self._held + text[: at + 1]
                self._held = ""
                return before[: len(before) - len(self._matched)]
        known = self._held + text
        hold = max(p.length for p in self._progress)
        self._held = known[len(known) - hold :]
        return known[: len(known) - hold]

    def flush(self) -> str:
        """The text held back, once nothing follows; after a match, nothing."""
        held, self._held = self._held, ""
        for progress in self._progress:
            progress.length = 0
        return held


class _Progress:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._shorter = _borders(stop)

    def step(self, character: str) -> bool:
        """Take one more character; whether the stop string is complete."""
        while self.length and self.stop[self.length] != character:
            self.length = self._shorter[self.length]
        if self.stop[self.length] == character:
            self.length += 1
        return self.length == len(self.stop)


def _borders(stop: str) -> list[int]:
    """For each length of a beginning of `stop`: the longest shorter beginning that it also ends with."""
    borders = [0] * (len(stop) + 1)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length]
        if stop[i] == stop[length]:
            length += 1
        borders[i + 1] = length
    return borders
