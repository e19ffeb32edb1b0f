"""Every policy that a deployment may have, in a master whose instances come and go: whatever happens, counts are right,
nobody is sent to an instance that is not there, and in the end everything has a place."""

import random

import pytest

from penstock.core.service_level import Bounds, Range
from penstock.core.wire.engine import SetRole
from penstock.core.wire.master import (
    Begun,
    Ended,
    Endpoint,
    Join,
    NoPlace,
    Outcome,
    Place,
    Placed,
    Relocate,
    Settled,
)
from penstock.sched.steptime import DEVICES, GEOMETRIES
from penstock.service.events import FromEngine, FromFrontend, ToEngine, ToFrontend
from penstock.service.flight import peers_of
from penstock.service.instances import ChannelLost
from penstock.service.master import Master
from penstock.service.policies import BUNDLES, STEADY, Circumstances
from tests.helpers.scripted import ready, snapshot

ROLES = {"colocated": ["any"] * 3, "roles": ["prefill", "decode", "decode"]}
ENGINE = {
    **{"max_model_len": 4000, "num_blocks": 200, "token_budget": 512, "max_sequences": 8},
    **{"device_model": DEVICES["h200"], "shape": GEOMETRIES["qwen3-8b"]},
}
LEVELS = [
    {},
    {"ttft_ms": 800.0, "tpot_ms": 40.0},
    {"ttft_ms": 0.1, "tpot_ms": 0.1},
    {"offline": True},
    {"priority": 5},
]
STEP = 0.05  # seconds


class Days:
    """Instances read 200 prompt tokens and draw 2 in every step."""

    def __init__(self, policy, roles, seed, live=False):
        self.rng = random.Random(seed)
        self.roles = {f"{role}-{i}": role for i, role in enumerate(roles)}
        bounds = {p: Bounds(ttft=Range(0.1, 0.5), tpot=Range(0.01, 0.05)) for p in (0, 5)}
        policies = BUNDLES[policy].make(Circumstances(priorities=bounds, live_roles=live))
        endpoints = [Endpoint(name, "", role) for name, role in self.roles.items()]
        self.master = Master(endpoints, policies, random.Random(seed), 1)
        self.now, self.life, self.asked = 0.0, 1, 0
        self.lives: dict[str, int] = {}
        self.told: dict[str, tuple[str, int]] = {}  # instance -> role and generation
        self.sequence = dict.fromkeys(self.roles, 0)
        self.places: dict[str, Place] = {}  # without an answer
        self.running: dict[str, list] = {}  # id -> lives, tokens to read, tokens to draw, times
        for name in self.roles:
            self.start(name)

    def did(self, happening=None):
        actions = self.master.tick(self.now, happening)
        self.master.check()
        for action in actions:
            if isinstance(action, ToFrontend):
                self.hear(action.message)
            elif isinstance(action, ToEngine) and isinstance(action.command, SetRole):
                self.told[action.name] = (action.command.role, action.command.generation)

    def hear(self, message):
        if isinstance(message, NoPlace):
            assert not self.lives, f"{message.message}, and there are {list(self.lives)}"
            del self.places[message.request_id]
        elif isinstance(message, Placed):
            place = self.places.pop(message.request_id)
            chosen = peers_of(message.route)
            for peer in chosen:
                assert self.lives[peer.name] == peer.incarnation
            self.running[place.request_id] = [
                chosen,
                place.prompt_tokens,
                place.max_tokens,
                self.now - place.waited,
                None,
            ]

    def start(self, name):
        self.life += 1
        self.lives[name], self.told[name] = self.life, (self.roles[name], 0)
        self.did(FromEngine(name, ready(name, self.life, self.roles[name], **ENGINE)))

    def die(self, name):
        if self.lives.pop(name, None) is None:
            return
        self.did(FromEngine(name, ChannelLost("gone")))
        for request_id in [r for r, (peers, *_) in self.running.items() if any(p.name == name for p in peers)]:
            del self.running[request_id]
            self.did(FromFrontend("f", Ended([request_id])))

    def ask(self):
        self.asked += 1
        level = self.rng.choice(LEVELS)
        place = Place(f"r{self.asked}", self.rng.choice([10, 300, 2000]), self.rng.choice([1, 8, 60]), [], **level)
        self.places[place.request_id] = place
        self.did(FromFrontend("f", place))

    def cancel(self):
        held = [*self.places, *self.running]
        if held:
            request_id = self.rng.choice(held)
            self.places.pop(request_id, None), self.running.pop(request_id, None)
            self.did(FromFrontend("f", Ended([request_id])))

    def step(self):
        self.now += STEP
        self.did(FromFrontend("f", Join("f", 1)))
        left = dict.fromkeys(self.lives, 200)
        for request_id, state in list(self.running.items()):
            peers, to_prefill, to_draw, arrived, first = state
            prefiller = peers[0].name
            if to_prefill:
                read = min(to_prefill, left[prefiller])
                left[prefiller] -= read
                state[1] = to_prefill - read
                if not state[1]:
                    state[4] = self.now
                    self.did(FromFrontend("f", Begun([request_id])))
                continue
            state[2] = to_draw - 2
            if state[2] <= 0:
                del self.running[request_id]
                outcome = Outcome(request_id, (first - arrived) * 1e3, 10.0, 1.0, 5)
                self.did(FromFrontend("f", Ended([request_id], [outcome])))
        for name, life in self.lives.items():
            self.sequence[name] += 1
            here = [s for s in self.running.values() if s[0][-1 if not s[1] else 0].name == name]
            held = sum(-(-s[1] // 64) + 1 for s in here)
            role, generation = self.told[name]
            counts = {
                "running": len(here),
                "prefill_tokens": sum(s[1] for s in here),
                "free_blocks": 200 - min(200, held),
            }
            said = snapshot(life, self.sequence[name], role, role_generation=generation, num_blocks=200, **counts)
            self.did(FromEngine(name, said))
        self.did()


@pytest.mark.parametrize("shape", ROLES)
@pytest.mark.parametrize("policy", STEADY)
def test_whatever_happens_everything_gets_its_place(policy, shape):
    for seed in range(3):
        days = Days(policy, ROLES[shape], seed, live=seed == 1)
        for _ in range(60):
            for _ in range(days.rng.randrange(3)):
                days.ask()
            what = days.rng.random()
            if what < 0.05:
                days.die(days.rng.choice(list(days.roles)))
            elif what < 0.3:
                for name in days.roles.keys() - days.lives.keys():
                    days.start(name)
            elif what < 0.4:
                days.cancel()
            days.step()
        for name in days.roles.keys() - days.lives.keys():
            days.start(name)
        for _ in range(2000):
            if not days.places and not days.running:
                break
            days.step()
        assert not days.places, f"{len(days.places)} still wait"
        assert days.master.waiting == 0
        assert not days.master._placed.sequences
        assert days.asked > 30


@pytest.mark.parametrize("meets", ["here", ""])
@pytest.mark.parametrize("policy", STEADY)
def test_sequences_leave_the_group_that_others_wait_for_whatever_the_policy(policy, meets):
    roomy = ENGINE | {"max_model_len": 1 << 20, "num_blocks": 20_000}
    master = Master([Endpoint(name, "") for name in "ab"], BUNDLES[policy].make(Circumstances()), random.Random(0), 1)
    for name in "ab":
        master.tick(0.0, FromEngine(name, ready(name, 1, meets=meets, **roomy)))
    for name in "rs":
        for said in (Place(name, 100_000, 1000, []), Settled(name, 0, "a"), Begun([name])):
            master.tick(0.0, FromFrontend("f", said))
    told = []
    for number in range(1, 20):
        now = number * STEP
        for name, running in (("a", 2), ("b", 0)):
            values = {"running": running, "running_tokens": running * 100_000, "free_blocks": 16_000}
            master.tick(now, FromEngine(name, snapshot(1, number, **values)))
        told += [a.message for a in master.tick(now) if isinstance(a, ToFrontend) and isinstance(a.message, Relocate)]
        master.check()
    moved = [(one.request_id, one.peer.name, one.reason.partition(":")[0]) for one in told]
    assert moved == ([("r", "b", "sequence")] if meets else [])
