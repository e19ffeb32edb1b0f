"""Sequences go on elsewhere when their engine is lost, or may hang, and those that break engines are refused.

Where each may go on is the business of `service.dispatcher`, who may hang that of `service.hedging`, and who is to
blame that of `service.isolation`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from penstock.core.clock import Clock
from penstock.core.errors import BreaksEngines, EngineFailure
from penstock.core.request import FinishReason, TokenOutput
from penstock.core.wire.engine import Peer
from penstock.obs.logs import quoted
from penstock.obs.metrics import Metrics
from penstock.service.dispatcher import Dispatcher
from penstock.service.flight import ATTEMPTS, Flight
from penstock.service.generation import Generation
from penstock.service.hedging import suspects, to_hedge
from penstock.service.isolation import CAUSE, PROBATION, Causes, Life, judge, life_of

log = logging.getLogger("penstock.frontend")


class Failover:
    """
    Args:
        told: somebody says how engines ended, by `learn`; their sequences wait for that.
    """

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, clock: Clock, told: bool = False) -> None:
        self._dispatcher = dispatcher
        self._flights = dispatcher.flights
        self._causes = Causes(told)
        self._metrics, self._clock = metrics, clock

    # --- after a loss

    def lose(self, life: Peer, reason: str) -> int:
        """An incarnation has ended. Returns how many requests that interrupts."""
        now = self._clock.now()
        for flight in list(self._flights.values()):
            for peer in flight.peers:
                if life_of(peer) == life_of(life):
                    flight.lose(peer, reason, now)
            if life_of(life) in map(life_of, flight.held_at):
                self._dispatcher.let_go(flight)
                self._ask_again(flight, f"{life.name} failed during this request ({reason})")
        stranded = {id(flight.owner) for flight in self._flights.values() if flight.stranded}
        self.rescue()
        return len(stranded)

    def rescue(self) -> int:
        """Continue all stranded sequences elsewhere, the most urgent first; returns the number of requests."""
        stranded = [f for f in self._flights.values() if f.stranded and not self._causes.awaited(f.places)]
        stranded.sort(key=lambda flight: flight.urgency)
        for flight in stranded:
            if flight.id in self._flights:  # a failing one may end others
                self.go_on(flight)
        return len({id(flight.owner) for flight in stranded})

    def go_on(self, flight: Flight[Generation]) -> None:
        """Continue a stranded sequence elsewhere, from the tokens that its client has, once it is known whether it may
        have broken where it was."""
        if self._causes.awaited(flight.places):
            return
        now = self._clock.now()
        if flight.held_at and not flight.suspected:
            self._dispatcher.take_back(flight)
            return
        self._dispatcher.cancel(flight, flight.peers)
        if flight.held_at:
            self._dispatcher.let_go(flight)  # it is not alone there
        if flight.launches >= ATTEMPTS:
            why = f"{flight.interrupted}, one of {flight.launches} failed attempts"
            log.warning("request %s: %s", flight.id, why)
            flight.owner.fail(EngineFailure(why))
            return
        log.info("request %s: %s; it has %d tokens", flight.id, flight.interrupted, flight.received)
        flight.owner.interrupted(flight.index, flight.received, flight.interrupted)
        flight.avoid = [*flight.suspects, *(peer.name for peer in flight.places if not self._dispatcher.reaches(peer))]
        flight.avoid += self._dispatcher.unlike(flight)
        if flight.suspected:
            flight.avoid.append(flight.broke[-1])  # which may be to blame itself
        flight.again()
        flight.asked_first = now
        self._dispatcher.add_keys(flight)
        self._dispatcher.ask(flight)

    def resumed(self, flight: Flight[Generation], output: TokenOutput) -> None:
        """It has continued: its first output from the new placement has arrived."""
        went = flight.resumed(output, self._clock.now())
        seconds = [None if ms is None else ms / 1e3 for ms in (went.predicted_ms, went.recompute_ms)]
        self._metrics.observe_recovery(went.how, went.took_ms / 1e3, *seconds)
        text = "request %s goes on at %s from token %d: %d tokens of %d were found there%s, after %.1f ms"
        known = len(flight.request.prompt) + output.start
        brought = f" or came from {went.source}" if went.source else ""
        log.info(text, flight.id, flight.route, output.start, output.cached_tokens, known, brought, went.took_ms)

    def tick(self, now: float) -> int:
        """Wait no longer for what did not come in time. Returns how many requests that interrupts."""
        if self._causes.expire(now):
            self.rescue()
        for flight in list(self._flights.values()):
            flight.tick(now)
        return self.rescue()

    # --- beside attempts that stand still

    def hedge(self, now: float) -> None:
        """Begin again elsewhere what is at instances that may hang, or keep it from them."""
        suspected = suspects(self._dispatcher.instances.values(), now)
        hang = [name for name, _ in suspected]
        begun: Counter[str] = Counter()
        for flight, remedy in to_hedge(suspected, self._flights.values(), now) if suspected else ():
            if flight.id not in self._flights:
                continue  # it has ended with another, which had no place
            if remedy == "keep":
                self._dispatcher.keep(flight)
                continue
            life = next(life for life in map(life_of, flight.places) if life in suspected)
            begun[f"{life[0]} may hang ({suspected[life]})"] += 1
            if remedy == "leave":
                flight.leave(f"{life[0]} may hang: {suspected[life]}", hang, now)
                self.go_on(flight)
            else:
                flight.avoid = self._dispatcher.unlike(flight)
                flight.hedge(f"{life[0]} may hang", hang, now)
                flight.asked_first = now
                self._dispatcher.add_keys(flight)
                self._dispatcher.ask(flight)
        for why, count in begun.items():
            log.warning("%s: %d sequences begin again elsewhere as well", why, count)

    def came_back(self, flight: Flight[Generation], name: str, output: TokenOutput) -> None:
        """Something came of the attempt that stood still, before anything came of the other."""
        if output.finish is FinishReason.ABORT:
            self._dispatcher.let_go(flight)
            self._ask_again(flight, f"{name} dropped this request")
        elif output.start <= flight.received:  # else who stands still has what is before it
            self.returned(flight)

    def returned(self, flight: Flight[Generation]) -> None:
        """It goes on where it stood still."""
        self._dispatcher.take_back(flight)
        self._metrics.observe_hedge("returned")

    def overtaken(self, flight: Flight[Generation]) -> None:
        """The attempt beside the one that stands still was the first to bring something."""
        self._dispatcher.let_go(flight)
        self._metrics.observe_hedge("overtaken")

    def _ask_again(self, flight: Flight[Generation], why: str) -> None:
        """The attempt that stood still is lost: where it was asked for a place with room to spare, any will do."""
        flight.interrupted = why
        flight.owner.interrupted(flight.index, flight.received, why)
        if not flight.placed:
            flight.again()
            flight.asked_first = self._clock.now()
            self._dispatcher.ask(flight)

    # --- which of them break engines

    def learn(self, life: Life, broken_by: Sequence[str]) -> bool:
        """Why an incarnation has ended; returns whether that is news."""
        if not self._causes.learn(life):
            return False
        name, now = life[0], self._clock.now()
        for flight in [self._flights[request_id] for request_id in broken_by if request_id in self._flights]:
            match judge(flight, life, broken_by):
                case "suspect":
                    flight.isolate(name, PROBATION, now)
                    self._metrics.observe_isolation("suspected")
                    text = "request %s: %s broke while it computed this and %d others, it is to run alone"
                    log.warning(text, quoted(flight.id), name, len(broken_by) - 1)
                case "guilty":
                    self._refuse(flight, name)
        return True

    def _refuse(self, flight: Flight[Generation], name: str) -> None:
        where = name if name == flight.broke[-1] else f"{flight.broke[-1]} and then {name}"
        flight.refused = f"it has broken {where}, the second time while nothing else was computed"
        self._metrics.observe_isolation("refused")
        log.error("request %s is refused: %s", quoted(flight.id), flight.refused)
        flight.owner.fail(BreaksEngines(f"this request breaks engines, and is not tried again: {flight.refused}"))

    def wait_for_cause(self, peer: Peer) -> None:
        """Its connection has ended, which may be for any reason."""
        if not self._causes.lost(life_of(peer), self._clock.now()):
            return

        def give_up() -> None:
            if self._causes.expire(self._clock.now()):
                self.rescue()

        asyncio.get_running_loop().call_later(1.01 * CAUSE, give_up)

    def check(self) -> None:
        """Raise AssertionError unless it is clear what is waited for."""
        self._causes.check()
        self._dispatcher.check()
