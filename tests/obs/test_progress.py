"""A bar for who looks at a terminal, and nothing for who does not."""

import io
import sys

import pytest

from penstock.obs.progress import byte_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_where_nobody_looks(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with byte_progress("weights") as report:
        assert report is None


def test_a_terminal_has_its_cursor_again_whatever_happens(monkeypatch):
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with byte_progress("weights"):
        pass
    assert not shown.getvalue(), "weights that are not read have no bar"
    with pytest.raises(TypeError), byte_progress("weights") as report:
        report(500_000_000, 2_000_000_000, report(500_000_000, 2_000_000_000))
    text = shown.getvalue()
    assert "weights" in text
    assert "0.5/2.0 GB" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
