"""Orders to engines to sleep and to wake up, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.core.errors import Conflict, Unavailable
from penstock.core.wire.engine import Peer, Sleep, Slept, WakeUp

Send = Callable[[str, Sleep | WakeUp], None]


class SleepOrders:
    """
    Args:
        send: a command to an instance.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._number = 0
        self._waiting: dict[tuple[str, int], asyncio.Future[Slept]] = {}  # by instance and number

    async def give(self, engines: Sequence[Peer], order: Callable[[int, int], Sleep | WakeUp]) -> None:
        """Give all of these an order, and wait until each has carried it out. One that ends meanwhile has no memory.

        Args:
            order: (incarnation, number) -> the command.

        Raises:
            Unavailable: there is no engine, or all have ended.
            Conflict: some have not carried it out.
        """
        self._number += 1
        number, loop = self._number, asyncio.get_running_loop()
        answers = {engine.name: loop.create_future() for engine in engines}
        for engine in engines:
            self._waiting[engine.name, number] = answers[engine.name]
            self._send(engine.name, order(engine.incarnation, number))
        try:
            said = await asyncio.gather(*answers.values(), return_exceptions=True)
        finally:
            for name in answers:
                self._waiting.pop((name, number), None)
        done = {name: answer for name, answer in zip(answers, said, strict=True) if isinstance(answer, Slept)}
        if errors := {name: answer.error for name, answer in done.items() if answer.error}:
            raise Conflict("; ".join(f"{name}: {error}" for name, error in errors.items()))
        if not done:
            raise Unavailable("no engine is there" if not said else f"no engine is there any more: {said[0]}")

    def answered(self, name: str, answer: Slept) -> None:
        """An engine says what has come of an order; that of a caller who has gone is nobody's."""
        waiting = self._waiting.get((name, answer.number))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def lost(self, name: str, why: str) -> None:
        """An instance's engine has ended."""
        for (other, _), waiting in self._waiting.items():
            if other == name and not waiting.done():
                waiting.set_exception(Unavailable(f"{name}: {why}"))
