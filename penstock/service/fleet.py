"""The instances of a deployment, as its master sees them: what their engines say and have, which roles they have, and
which are started, stopped or started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from penstock.core.wire.engine import (
    AskCache,
    CacheDelta,
    Drain,
    Event,
    Failed,
    LinkFailed,
    MediaRoute,
    Ready,
    Role,
    SetRole,
    Snapshot,
    Stopped,
)
from penstock.core.wire.master import (
    Endpoint,
    InstanceOverview,
    RestartInstance,
    StageOverview,
    StartInstance,
    StopInstance,
)
from penstock.kv.embeddings import EMBEDDINGS
from penstock.kv.ideal import IdealCache
from penstock.kv.index import DEVICE, ClusterIndex
from penstock.sched.cluster import ClusterView, Move, SlowInstances, Start, Stop, Tally
from penstock.service.events import Action, Notice, ToEngine
from penstock.service.fleet_account import FleetAccount
from penstock.service.image_places import ImagePlaces
from penstock.service.instances import ChannelLost
from penstock.service.kv_sources import KVSources
from penstock.service.mesh import Mesh
from penstock.service.overview import instance_overview, stage_overview
from penstock.service.recorder import Recorder
from penstock.service.session import InstanceSession, Roster, Scaler

ASK_AGAIN = 2.0  # seconds between two AskCache
LOOK = 0.5  # seconds between two looks for slow instances
TELL_AGAIN = 6.0  # seconds until a launcher is told again to restart one; it stops within less


class Fleet:
    """
    Args:
        endpoints: of the deployment, at first; others come and go by `register` and `remove`.
        everybody: whether all have links to all, as any may come to have any role.
        scaler: None when nothing is ever started or stopped.
        slow: says which instances are restarted because they are slow; None where none ever is.
        recorder: gets every change.
        media_route: which stages of requests with images are together, as `ImagePlaces` has it.
        ideal: what a cache without end would have found; None where prompts come without keys.

    Attributes:
        endpoints: all instances that there can be, by name.
        sessions: those that serve, or drain.
        roster: those of them that may be given work.
        index: which instance has which prefix, for policies that use it; empty for others.
        sources: from where KV can be brought.
        images: who looks at the images of requests.
        account: what the instances cost, and how they were changed.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        everybody: bool,
        scaler: Scaler | None,
        slow: SlowInstances | None,
        recorder: Recorder | None,
        media_route: MediaRoute | None,
        ideal: IdealCache | None,
    ) -> None:
        self.endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self.sessions: dict[str, InstanceSession] = {}
        self._touched: set[str] = set()  # sessions that have changed
        self.roster = Roster(self.sessions, self._touched)
        self.index, self.ideal = ClusterIndex(), ideal
        self.sources = KVSources(self.index, self.sessions, self.roster)
        self.images = ImagePlaces(self.sessions, self.roster, media_route)
        self.account = FleetAccount(sum(endpoint.holds_devices for endpoint in endpoints))
        self.scaler = scaler
        self._mesh = Mesh(self.sessions, everybody=everybody)
        self._recorder = recorder
        self._roles: dict[str, Role] = {}  # that were decided on
        self._slow, self._look_at = slow, -inf
        self._restarting: dict[str, float] = {}  # instances -> when their launchers were told

    # --- who is there

    def register(self, now: float, endpoint: Endpoint) -> list[Action]:
        """It is part of the deployment, or has another address, role or state than before."""
        name = endpoint.name
        before, self.endpoints[name] = self.endpoints.get(name), endpoint
        self.account.hold(now, endpoint.holds_devices - int(before is not None and before.holds_devices))
        if endpoint.started and (before is None or before.started != endpoint.started):
            self.account.took(name, endpoint.started)
        if endpoint.given_up and self.scaler is not None:
            self.scaler.forget(name)
        session = self.sessions.get(name)
        if not endpoint.runs:
            return self._stopped(name, "it was stopped")
        if before is not None and before.address != endpoint.address:
            return self._leave(name, "it is elsewhere now")
        if session is not None and endpoint.state == "leaving" and not session.drains:
            return self._drain(session, "it is to leave")
        return []

    def remove(self, now: float, name: str, why: str) -> list[Action]:
        """It is not part of the deployment any more."""
        gone = self.endpoints.pop(name, None)
        self.account.hold(now, -int(gone is not None and gone.holds_devices))
        self._roles.pop(name, None)
        actions = self._stopped(name, why)
        self.index.forget(name)
        return actions

    def _stopped(self, name: str, why: str) -> list[Action]:
        self.account.left(name)
        if self.scaler is not None:
            self.scaler.forget(name)
        return self._leave(name, why)

    def _drain(self, session: InstanceSession, why: str) -> list[Action]:
        session.drain()
        return [
            ToEngine(session.name, Drain(session.peer.incarnation)),
            Notice(f"{session.name} is drained: {why}"),
        ]

    def suspect(self, troubles: Mapping[str, str]) -> None:
        """What launchers say: instance -> why it cannot serve, or may not be able to."""
        for session in self.sessions.values():
            session.suspect(session.name in troubles)

    def tick(self, now: float) -> list[Action]:
        """Time passes: what did not come about is tried again."""
        self.account.begin(now)
        return self._mesh.retry(now)

    def is_new(self, name: str, ready: Ready) -> bool:
        """Whether this incarnation was not there before."""
        session = self.sessions.get(name)
        return name in self.endpoints and (session is None or session.peer.incarnation != ready.peer.incarnation)

    def _join(self, now: float, name: str, ready: Ready) -> list[Action]:
        actions = self._leave(name, "another incarnation of it has begun")
        if self.scaler is not None:
            self.scaler.forget(name)
        self.index.forget(name)
        self.images.forget(name)
        if ready.store:
            self.index.share(name, ready.store)
            if self.ideal is not None:
                self.ideal.complete = False  # nobody says what was in it before
        session = self.sessions[name] = InstanceSession(ready, heard=now, role=ready.role, touched=self._touched)
        self.account.came(name, ready.weights_from)
        self.roster.sessions_changed()
        actions.append(Notice(f"{name} is ready: role {session.role}, {ready.num_blocks} blocks on {ready.device}"))
        if self._roles.get(name, session.role) != session.role:
            session.role, session.role_generation = self._roles[name], 1
            actions.append(self._set_role(session))
        if self.endpoints[name].state == "leaving":
            actions += self._drain(session, "it is to leave")
        return actions + self._mesh.connect(session)

    def _leave(self, name: str, why: str) -> list[Action]:
        session = self.sessions.pop(name, None)
        if session is None:
            return []
        self._restarting.pop(name, None)
        self.index.leave(name, session.ready.kv_pool)
        self.sources.forget(name)
        self.images.forget(name)
        self.roster.sessions_changed()
        return [Notice(f"{name} has gone: {why}"), *self._mesh.leave(name)]

    # --- what engines say

    def hear(self, now: float, name: str, event: Event | ChannelLost) -> list[Action]:
        """Something comes from an engine, or its connection has ended."""
        session = self.sessions.get(name)
        match event:
            case Snapshot() if session is not None and event.incarnation == session.peer.incarnation:
                return self._on_snapshot(now, session, event)
            case Ready():
                if self.is_new(name, event):
                    return self._join(now, name, event)
            case ChannelLost(message=message) | Failed(message=message):
                return self._leave(name, message)
            case Stopped() if session is not None and event.incarnation == session.peer.incarnation:
                return self._leave(name, "it was stopped")
            case CacheDelta() if session is not None and event.incarnation == session.peer.incarnation:
                return self._on_cache(now, session, event)
            case LinkFailed(peer=peer, message=message) if session is not None:
                if event.incarnation == session.peer.incarnation:
                    return self._mesh.fail(now, session, peer, message)
        return []

    def _on_cache(self, now: float, session: InstanceSession, delta: CacheDelta) -> list[Action]:
        """An engine says what its prefix cache, or that of what it has seen, has gained and lost."""
        embeddings = delta.tier == EMBEDDINGS
        if (
            self.ideal is not None and not embeddings and (delta.tier == DEVICE or delta.whole)
        ):  # as what a disk has kept
            self.ideal.learn(delta.added)
        index = self.images if embeddings else self.index
        if index.apply(session.name, delta) or now - session.asked < ASK_AGAIN:
            return []
        session.asked = now
        return [ToEngine(session.name, AskCache(delta.incarnation))]

    def _on_snapshot(self, now: float, session: InstanceSession, snapshot: Snapshot) -> list[Action]:
        session.hear(now, snapshot)
        if snapshot.role == session.role:
            session.role_generation = max(
                session.role_generation, snapshot.role_generation
            )  # counted by an earlier master
            return self._has_role(now, session) if snapshot.role_generation == session.role_generation else []
        if snapshot.role_generation < session.role_generation:
            return [self._set_role(session)]  # the command was lost or is late
        session.role, session.role_generation = snapshot.role, snapshot.role_generation  # decided before this master
        return self._mesh.connect(session)

    @staticmethod
    def _has_role(now: float, session: InstanceSession) -> list[Action]:
        """An instance says that it has the role that it should."""
        decided, session.role_decided = session.role_decided, None
        if decided is None:
            return []
        return [Notice(f"{session.name} has role {session.role} {(now - decided) * 1e3:.1f} ms after the decision")]

    def _set_role(self, session: InstanceSession) -> Action:
        return ToEngine(session.name, SetRole(session.peer.incarnation, session.role, session.role_generation))

    # --- roles and numbers

    def move(self, now: float, moves: Sequence[Move]) -> list[Action]:
        """These instances have other roles from now on."""
        actions: list[Action] = []
        for move in moves:
            session = self.sessions[move.name]
            if session.role == move.role:
                continue
            self._roles[move.name] = session.role = move.role
            session.role_generation += 1
            session.role_decided = now
            session.changed()
            actions.append(self._set_role(session))
            actions.append(Notice(f"{move.name} changes to role {move.role}: {move.reason}"))
            actions += self._mesh.connect(session)
            if self._recorder is not None:
                self._recorder.moved(now, move)
        return actions

    def scale(self, now: float, view: ClusterView, lately: Sequence[Tally]) -> list[Action]:
        """Start, stop and move instances, where that is due.

        Args:
            lately: what came and went since the last time.
        """
        scaler = self.scaler
        assert scaler is not None
        actions: list[Action] = []
        expected = self.account.expected(scaler.start_seconds)
        scaled = scaler.decide(view, self.endpoints, self.sessions, self._roles, expected, lately)
        if self._recorder is not None and scaler.has_news(now):
            self._recorder.scaled(now, scaled.verdicts)
        for change in scaled.changes:
            self.account.changed(change)
            if self._recorder is not None and not isinstance(change, Move):
                self._recorder.moved(now, change)
            match change:
                case Move():
                    actions += self.move(now, [change])
                case Start(name=name, role=role, reason=reason):
                    self._roles[name] = role
                    actions += [StartInstance(name, role), Notice(f"{name} is started for role {role}: {reason}")]
                case Stop(name=name, reason=reason):
                    actions += self._drain(self.sessions[name], reason)
        return actions

    def restart_slow(self, now: float) -> list[Action]:
        """Have an instance that is slow drain, and start again."""
        slow = self._slow
        if slow is None or now < self._look_at:
            return []
        self._look_at = now + LOOK
        paces = [session.pace for session in self.sessions.values() if not (session.leaving or session.silent(now))]
        restart = slow.look(now, [pace for pace in paces if pace is not None])
        if restart is None:
            return []
        self._restarting[restart.name] = -inf
        self.account.changed(restart)
        if self._recorder is not None:
            self._recorder.moved(now, restart)
        return self._drain(self.sessions[restart.name], restart.reason)

    def recall_restart(self, now: float, name: str, times: int, ago: float) -> None:
        """Its launcher says that it was restarted for slowness, perhaps by an earlier master; see `SlowInstances`."""
        if self._slow is not None:
            self._slow.recall(now, name, times, ago)

    def retire(self, now: float) -> list[Action]:
        """Stop instances that have drained, or have them start again."""
        actions: list[Action] = []
        for session in self.sessions.values():
            name = session.name
            if not (session.drains and session.drained):
                continue
            if not session.draining:  # an earlier master has told it to, for whatever reason
                self._restarting.setdefault(name, -inf)
            if name not in self._restarting or self.endpoints[name].state == "leaving":
                actions.append(StopInstance(name))
            elif now - self._restarting[name] >= TELL_AGAIN:
                self._restarting[name] = now
                times = 0 if self._slow is None else self._slow.times(name)
                actions.append(RestartInstance(name, times))
        return actions

    # --- how they do

    def states(self, now: float) -> dict[str, str]:
        """Every instance -> "absent", "ready", "suspect", "draining" or "sleeping"."""
        return {name: self._state(now, self.sessions.get(name)) for name in self.endpoints}

    def serves(self, now: float, name: str) -> bool:
        """Whether it is heard, and does what it was given."""
        return self._state(now, self.sessions.get(name)) not in ("absent", "suspect")

    def _state(self, now: float, session: InstanceSession | None) -> str:
        if session is None:
            return "absent"
        if session.silent(now):
            return "suspect"
        return "draining" if session.drains else "sleeping" if session.sleeps else "ready"

    def givers(self, now: float) -> dict[str, str]:
        """Every instance that serves and gives its weights to other hosts -> where."""
        ready = (s for s in self.sessions.values() if self._state(now, s) == "ready")
        return {session.name: session.ready.weights_at for session in ready if session.ready.weights_at}

    @property
    def stages(self) -> list[StageOverview]:
        """What scaling looked at last."""
        return [] if self.scaler is None else [stage_overview(verdict) for verdict in self.scaler.verdicts]

    def overviews(self, now: float) -> list[InstanceOverview]:
        """How each instance does."""
        slow = {} if self._slow is None else self._slow.verdicts
        return [
            instance_overview(endpoint, session, self._state(now, session), slow.get(name, ""))
            for name, endpoint in self.endpoints.items()
            for session in [self.sessions.get(name)]
        ]

    def check(self) -> None:
        """Raise AssertionError unless what is known of instances fits together."""
        for session in self.sessions.values():
            session.check()
        self.roster.check()
        self._mesh.check()
        self.images.check()
        assert self._restarting.keys() <= self.sessions.keys(), "it has gone"
