"""Processes of a deployment are killed in every phase of a hand-off, and messages between engines are lost and spoiled.

A client gets its full text, as long as its frontend lives, and never a wrong one; afterwards nothing is left anywhere.
"""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest

from penstock.core.wire.engine import LEASE
from penstock.transfer.transports import TRANSPORTS
from tests.helpers.chaos import MARGIN, PHASES, borrower, paced
from tests.helpers.deployments import DEMO, colocated, deployed
from tests.helpers.links import KINDS, NEEDS_MOONCAKE
from tests.helpers.waiting import eventually

LOST = {"error event", "http 503"}  # what a client sees of a frontend that dies; "connection" before it is accepted
STALLS = {"stall": list(PHASES.values())}
EVERY_PHASE = [*PHASES, "decode"]
VICTIMS = ["prefill-0", "decode-0", "frontend-0", "master", "kv-pool", "borrower"]
FROZEN = [("prefill-0", "commit"), ("decode-0", "commit")]  # quick ones, as these:
QUICK = [
    ("shared", "prefill-0", "push"),
    ("shared", "decode-0", "commit"),
    ("shared", "frontend-0", "committed"),
    ("shared", "master", "reserve"),
    ("shared", "borrower", "push"),
]


def needs(kind, *, slow):
    return [pytest.mark.slow] * slow + [NEEDS_MOONCAKE] * (kind == "mooncake")


def strike(chaos, victim, phase, requests=4, seed=0):
    """Kill in a phase of a few requests, and check that all are answered, but for those of a frontend that dies, and
    what becomes of everything else.

    Returns the answers, whole ones and others.
    """
    up, mark = chaos.up, len(chaos.up.lines)
    load = chaos.start(chaos.bodies(requests, seed))
    chaos.reach(phase, mark)
    earlier = up.kill(victim)
    killed = time.monotonic()
    records = load.wait()
    up.wait_restarted(victim, earlier)
    chaos.settle()
    chaos.verify(load)
    failed = [r for r in records if r.error]
    allowed = LOST if victim.startswith("frontend") else set()
    assert {r.error for r in failed} <= allowed, [(r.error, r.detail) for r in failed]
    late = [f"{r.end - killed:.1f} s: {r.detail}" for r in failed if r.end > killed + LEASE + MARGIN]
    assert not late, late
    return records


def strike_borrower(chaos, phase, seed):
    """The same for a client of the KV pool server that is no engine, and that shares blocks with those that are."""
    up = chaos.up
    chaos.run(chaos.bodies(2, seed))  # so that there is something to share
    with borrower(chaos) as other:
        assert other.own
        assert other.foreign
        mark = len(up.lines)
        load = chaos.start(chaos.bodies(4, seed))
        chaos.reach(phase, mark)
        other.kill()
        load.wait()
    assert eventually(lambda: any("borrower (" in line and " is over" in line for line in up.lines[mark:]))
    chaos.settle()  # when the time of what it leaves behind has passed
    assert chaos.verify(load).checked == 4


@pytest.fixture(scope="module")
def pairs():
    """By transport: an engine for prompts, one for answers; of each request each phase's first message is lost."""
    opened = {}
    with ExitStack() as stack:

        def pair(kind):
            if kind not in opened:
                opened[kind] = stack.enter_context(paced(kind, faults=STALLS))
            return opened[kind]

        yield pair


@pytest.mark.parametrize(
    ("kind", "victim", "phase"),
    [
        pytest.param(kind, victim, phase, marks=needs(kind, slow=(kind, victim, phase) not in QUICK))
        for kind in TRANSPORTS
        for victim in VICTIMS
        for phase in EVERY_PHASE
    ],
)
def test_whoever_is_killed_whenever(pairs, kind, victim, phase):
    seed = EVERY_PHASE.index(phase) + 10 * VICTIMS.index(victim)
    if victim == "borrower":
        strike_borrower(pairs(kind), phase, seed)
        return
    strike(pairs(kind), victim, phase, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_of_each_and_all_of_them_die(kind):
    """A round of deaths under load: of every process, with whatever happens to be going on."""
    with paced(kind, 2, 2, faults=STALLS, frontends=2) as chaos:
        for seed, victim in enumerate(["decode-1", "master", "frontend-1", "prefill-0", "decode-0", "prefill-1"]):
            records = strike(chaos, victim, EVERY_PHASE[seed % len(EVERY_PHASE)], requests=12, seed=seed)
            assert any(not r.error for r in records), "those who had nothing to do with it are served"


# --- who only stands still

PATIENT = {"backoff": 1e-6, "limit": 1000, "heartbeat-timeout": 120}  # seconds; nobody is killed for that here


@pytest.fixture(scope="module")
def fours():
    with paced("shared", 2, 2, faults=STALLS, restart=PATIENT) as chaos:
        yield chaos


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        pytest.param(victim, phase, marks=[pytest.mark.slow] * ((victim, phase) not in FROZEN))
        for victim in ("prefill-0", "decode-0")
        for phase in EVERY_PHASE
    ],
)
def test_whoever_stands_still_whenever(fours, victim, phase):
    """All answers come while it does, the right ones, and it has nothing of them when it goes on."""
    chaos, mark = fours, len(fours.up.lines)
    load = chaos.start(chaos.bodies(8, seed=EVERY_PHASE.index(phase)))
    chaos.reach(phase, mark)
    frozen = chaos.up.kill(victim, signal.SIGSTOP)
    try:
        records = load.wait()
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert not (failed := [r.detail for r in records if r.error]), failed
    begun = [line for line in chaos.up.lines[mark:] if f"{victim} may hang" in line]
    assert begun or victim != "prefill-0"
    chaos.settle()
    assert chaos.verify(load).checked == 8


# --- the network at its worst

FAULTS = {
    "delay": {"delay-ms": 40},
    "drop": {"drop": 0.2},
    "duplicate": {"duplicate": 0.5},
    "reorder": {"reorder": 0.5},
    "corrupt": {"corrupt": 0.2},
    "partition": {"partition": {"after": 150, "for-s": 4}},
    "cut-off": {"partition": {"after": 150}},
    "all": {"delay-ms": 10, "drop": 0.05, "duplicate": 0.2, "reorder": 0.2, "corrupt": 0.1},
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, fault, marks=needs(kind, slow=(kind, fault) != ("tcp", "all")))
        for kind in TRANSPORTS
        for fault in FAULTS
    ],
)
def test_a_bad_network_costs_time_and_never_an_answer(kind, fault):
    with paced(kind, faults=FAULTS[fault] | {"seed": 3}) as chaos:
        before = chaos.up.metric("handoffs_total")
        load = chaos.start(chaos.bodies(20, seed=5, prompts=(50, 700), tokens=30))
        records = load.wait()
        chaos.settle()
        assert not [(r.error, r.detail) for r in records if r.error]
        assert chaos.verify(load).checked == 20
        assert chaos.up.metric("handoffs_total") > before


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("message", ["Reserve", "Reserved", "Push", "Commit", "Missing", "Committed", "Renew"])
def test_a_message_that_never_arrives(kind, message):
    """Without a place, requests stay; without a word after the commit, whoever has them goes on, or they begin anew."""
    with paced(kind, faults={"drop": 1, "only": [message]}) as chaos:
        began, before = time.monotonic(), chaos.up.metric("recoveries_total")
        load = chaos.start(chaos.bodies(6))
        records = load.wait()
        chaos.settle()
        chaos.verify(load)
        assert not [(r.error, r.detail) for r in records if r.error]
        recovered = chaos.up.metric("recoveries_total") - before
        assert recovered == (6 if message in ("Push", "Commit") else 0)
        late = [r.end - began for r in records if r.end - began > 2 * LEASE + MARGIN]
        assert not late, late


# --- what outlives an engine


def ask(up, **body):
    """An answer's text, and how much of the prompt was found in the cache."""
    data = json.dumps({"model": "demo", "temperature": 0, "ignore_eos": True} | body).encode()
    request = urllib.request.Request(up.url + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read())
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def serves(up):
    try:
        return json.loads(up.get("/health"))["instances"][0]["state"] == "ready"
    except urllib.error.HTTPError:
        return False


def inherited(up, name, mark):
    """Blocks that the newest life of an engine found."""
    said = [line for line in up.lines[mark:] if f" {name} (" in line and " inherited" in line]
    return int(said[-1].split(" inherited")[0].split()[-1]) if said else 0


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["alone", "pair"])
def test_a_killed_engine_finds_its_cache_again(alone):
    """It dies in the middle of an answer. Its next life takes over the blocks that the KV pool server has kept."""
    victim = "engine-0" if alone else "decode-0"
    waits = {"kv-pool": {"orphans": 120}}  # however long a process takes to start
    with paced("tcp", **waits, **({"instances": [{}]} if alone else {})) as chaos:
        up, bodies = chaos.up, chaos.bodies(3, seed=9, prompts=(300, 600))
        chaos.run(bodies)
        mark, load = len(up.lines), chaos.start(bodies)
        chaos.reach("decode", mark)
        up.wait_restarted(victim, up.kill(victim))
        load.wait()
        chaos.settle()
        chaos.verify(load)
        assert inherited(up, victim, mark) >= sum(len(body["prompt"]) // 64 for body in bodies[:1])
        inspection = chaos.inspect(victim)
        assert inspection.counts["cached_blocks"] == inherited(up, victim, mark)
        for record, body in zip(chaos.run(bodies), bodies, strict=True):
            assert record.cached_tokens // 64 == (len(body["prompt"]) - 1) // 64


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_what_a_killed_engine_had_is_brought_to_the_others(kind):
    """Its long prompts are not computed again: the KV pool server has kept their blocks."""
    with paced(kind, instances=[{"count": 3}], **{"kv-pool": {"orphans": 120}}) as chaos:
        up, begun = chaos.up, chaos.up.metric("time_to_first_token_seconds_count")
        load = chaos.start(chaos.bodies(9, seed=11, prompts=(900, 1000), tokens=300))
        eventually(lambda: up.metric("time_to_first_token_seconds_count") == begun + 9, what=up.log)
        victim = max(chaos.engines, key=lambda name: chaos.inspect(name).counts["running"])
        up.wait_restarted(victim, up.kill(victim))
        records = load.wait()
        chaos.settle()
        assert not [(r.error, r.detail) for r in records if r.error]
        assert chaos.verify(load).checked == 9
        went = {how: up.metric("recoveries_total", how=how) for how in ("recompute", "cache", "fetch", "remap")}
        assert went["recompute"] == 0, went
        assert went["fetch"] + went["remap"] >= 2, went
        assert up.metric("recovery_seconds_count") == sum(went.values())


@pytest.mark.slow
def test_a_killed_demo_engine_finds_its_cache_again():
    prompt = "import os\n\ndef find(folder):\n" * 20
    with deployed(colocated(1, engine=DEMO, restart={"backoff": 0.01})) as up:
        text, cached = ask(up, prompt=prompt, max_tokens=40)
        assert cached == 0
        mark, earlier = len(up.lines), up.kill("engine-0")
        up.wait_restarted("engine-0", earlier)
        eventually(lambda: any("engine-0 is ready: " in line for line in up.lines[mark:]), 90)
        eventually(lambda: serves(up))
        assert inherited(up, "engine-0", mark) > 0
        again, cached = ask(up, prompt=prompt, max_tokens=40)
        assert cached > 0
        assert again == text
