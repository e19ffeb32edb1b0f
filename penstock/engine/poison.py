"""Requests that break a modelled engine, for drills: whoever computes a certain token dies of it."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.core.plan import StepPlan

ERROR = "error"
HOW = (ERROR, "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGKILL")


@dataclass(frozen=True, slots=True)
class Poison:
    """
    Attributes:
        token: that breaks the engine, in a step that computes it.
        how: one of `HOW`.
    """

    token: int
    how: str

    @classmethod
    def read(cls, text: str) -> Poison:
        """Of TOKEN:HOW. Raises ConfigError."""
        token, _, how = text.partition(":")
        if not token.isascii() or not token.isdecimal() or how not in HOW:
            raise ConfigError(f"poison: {text!r}, allowed is TOKEN:HOW, with HOW one of {', '.join(HOW)}", "poison")
        return cls(int(token), how)

    def taste(self, plan: StepPlan) -> None:
        """Break where that token is to be computed."""
        if not any(self.token in step.tokens for step in plan.sequences):
            return
        if self.how == ERROR:
            raise RuntimeError(f"token {self.token} breaks this engine")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.Signals[self.how])
        signal.pause()  # what a thread sends to its process may reach another one first
