"""Stop strings in streamed text."""

from __future__ import annotations

from functools import lru_cache


class StopStrings:
    """Ends a text at the first stop string, and holds back text that may be the beginning of one.

    The first stop string is the one that is complete first; of several complete at the same character, the longest. The
    result does not depend on how the text is cut into chunks.

    Attributes:
        matched: the stop string that was found, or None.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        """
        Args:
            stops: none of them empty.
            include_in_output: whether the text ends after the stop string, not before it. Nothing is held back then.
        """
        assert all(stops), "an empty stop string"
        self.matched: str | None = None
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._progress = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._first_chars = {stop[0] for stop in stops}
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """The text that may be returned now; empty once a stop string was found.

        Args:
            may_end: whether a stop string that becomes complete within this text counts.
        """
        if self.matched is not None:
            return ""
        if not any(self._progress) and self._first_chars.isdisjoint(text):
            return text
        shown = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._advance(char, may_end)
            if self.matched is not None:
                self._held = ""
                return shown[: end if self._include else end - len(self.matched)]
        cut = len(shown) if self._include else len(shown) - max(self._progress)
        self._held = shown[cut:]
        return shown[:cut]

    def flush(self) -> str:
        """The text still held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str, may_end: bool) -> None:
        """One step of Knuth-Morris-Pratt for each stop string, the longest first."""
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            length = self._progress[i]
            while length and stop[length] != char:
                length = borders[length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                if may_end:
                    self.matched = stop
                    return
                length = borders[-1]
            self._progress[i] = length


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of the longest shorter prefix that it also ends with."""
    borders = [0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = borders[length - 1]
        if stop[length] == char:
            length += 1
        borders.append(length)
    return tuple(borders)
