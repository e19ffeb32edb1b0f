"""Who gets on and who does not, by heartbeat and by what the kernel says."""

import asyncio
import os
import signal
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from penstock.core.heartbeat import (
    EVERY,
    LOADING,
    STILL_LOADING,
    TURN,
    Beat,
    Heartbeat,
    keep_beating,
    read_heartbeat,
    step_limit,
)
from penstock.service.watch import MOVED, SUSPECT_AFTER, Vitals, Watch, is_stopped, read_vitals
from tests.helpers.waiting import eventually, until

TIMEOUT = 5.0
LOOK = 0.5


def watched(beat, vitals_at, seconds, waits=False, early=False):
    """(when it is suspected, when it is given up, why): a process with one beat; None for what does not happen."""
    watch, suspected, now = Watch(0.0, TIMEOUT, waits, early), None, 0.0
    assert watch.beats(now, beat)
    while now < seconds:
        now += LOOK
        assert not watch.beats(now, beat)
        if trouble := watch.trouble(now, vitals_at(now)):
            suspected = suspected or now
            if trouble.hangs:
                return suspected, now, trouble.why
    return suspected, None, ""


def idle(now):
    return Vitals()


def computing(now):
    return Vitals(cpu=0.9 * now)


def starved(now):
    return Vitals(held_up=True)


STEP = Beat(7, 500.0)
ELSEWHERE = Beat(7, 500.0, 500.0)  # a GPU computes


@pytest.mark.parametrize(
    ("beat", "vitals_at", "when", "why"),
    [
        (Beat(7, TURN), idle, TIMEOUT, "it does nothing"),
        (STEP, computing, 500, "no step takes that long"),  # a long step that computes is given its time
        (STEP, lambda now: Vitals(cpu=min(now, 40)), 40 + TIMEOUT, "it does nothing"),
        (STEP, lambda now: Vitals(cpu=0.001 * now), TIMEOUT, "it does nothing"),  # it only answers the wire
        (STEP, lambda now: Vitals(cpu=0.04 * now), 500, "no step"),  # a crowded machine
        (STEP, starved, 500, "no step"),  # a still more crowded one
        (STEP, lambda now: Vitals(held_up=now > 2, stopped=now > 7), 7 + TIMEOUT, "a signal has stopped it"),
        (ELSEWHERE, idle, 500, "no step"),
        (ELSEWHERE, lambda now: Vitals(stopped=True), TIMEOUT, "a signal has stopped it"),
        (LOADING, lambda now: Vitals(stopped=True), TIMEOUT, "a signal has stopped it"),
        (LOADING, idle, STILL_LOADING, "it does nothing"),
    ],
)
def test_when_it_is_given_up(beat, vitals_at, when, why):
    _, hung, said = watched(beat, vitals_at, 1000)
    assert when < hung <= when + 2 * LOOK
    assert why in said
    assert f"no heartbeat for {hung:.0f} s" in said


@pytest.mark.parametrize(
    "vitals_at", [computing, starved, lambda now: Vitals(faults=now // 30), lambda now: Vitals(0.01 * now)]
)
def test_loading_may_take_its_time(vitals_at):
    assert watched(LOADING, vitals_at, 5000) == (None, None, "")


def test_it_is_suspected_before_it_is_given_up():
    """Whoever routes traffic learns of it within five seconds."""
    for vitals_at in (idle, lambda now: Vitals(stopped=True)):
        suspected, hung, _ = watched(Beat(1, TURN), vitals_at, 100)
        assert SUSPECT_AFTER < suspected <= SUSPECT_AFTER + 2 * LOOK < hung
    assert watched(STEP, starved, 400)[0] is None
    stopped, hung, _ = watched(ELSEWHERE, lambda now: Vitals(stopped=now > 9), 100, early=True)
    assert 9 < stopped <= 9 + 2 * LOOK, "others go on with what it has"
    assert hung > 9 + TIMEOUT, "it may yet come back"
    for vitals_at in (idle, computing, starved):
        assert watched(STEP, vitals_at, 100, early=True) == watched(STEP, vitals_at, 100), "it may be busy"
    assert watched(ELSEWHERE, idle, 400)[0] is None


def test_who_may_wait_for_another_process_is_given_up_after_that_one():
    _, own, _ = watched(STEP, idle, 100)
    _, waiting, _ = watched(STEP, idle, 100, waits=True)
    assert own + TIMEOUT <= waiting <= own + TIMEOUT + LOOK


def test_a_beat_starts_all_anew_and_so_does_a_pause_of_the_watch():
    watch = Watch(0.0, TIMEOUT)
    for now in range(0, 1000, 9):
        assert watch.beats(now, Beat(now + 1, TURN))
        assert watch.trouble(now + 0.5, Vitals(stopped=True)) is None
    watch.beats(1000, Beat(1, TURN))
    assert watch.trouble(1000 + TIMEOUT - 0.1, Vitals(stopped=True)).hangs is False
    watch.restart(2000)
    assert not watch.beats(2000, Beat(1, TURN))
    assert watch.trouble(2000.5, Vitals(stopped=True)) is None, "whoever watches was stopped as well"


def test_the_heartbeat_says_what_a_step_may_take(tmp_path):
    path = tmp_path / "heartbeat"
    assert read_heartbeat(path) == LOADING
    assert LOADING.limit == inf
    heartbeat = Heartbeat(path)
    assert read_heartbeat(path) == LOADING, "it has not begun"
    heartbeat.beat()
    assert read_heartbeat(path) == Beat(1, TURN)
    heartbeat.beat(512)
    assert read_heartbeat(path) == Beat(2, step_limit(512, "cpu"))
    gpu = Heartbeat(path, "cuda:0")
    gpu.beat(512)
    beat = read_heartbeat(path)
    assert beat.still == beat.limit == step_limit(512, "cuda:0") < step_limit(512, "cpu")


def test_an_event_loop_beats(tmp_path):
    async def scenario():
        beating = asyncio.create_task(keep_beating(tmp_path / "heartbeat"))
        await until(lambda: read_heartbeat(tmp_path / "heartbeat").number > 1)
        beating.cancel()

    assert EVERY < TIMEOUT / 5
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_the_vitals_of_a_process_and_of_what_it_started():
    """A compiler that an engine waits for works for the engine."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", script], process_group=0)
    try:
        eventually(lambda: read_vitals(process.pid).cpu > 2 * MOVED)
        assert not read_vitals(process.pid).stopped
        assert not is_stopped(process.pid)
        assert read_vitals(process.pid).held_up
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: read_vitals(process.pid).stopped and is_stopped(process.pid))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    eventually(lambda: read_vitals(process.pid) == Vitals())


@pytest.mark.parametrize("busy", [True, False])
def test_a_thread_that_would_run_counts_and_one_that_waits_does_not(busy):
    work = "threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()\n"
    script = "import threading, signal\n" + work * busy + "signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", script], process_group=0)
    try:
        eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "S")  # its main thread waits
        eventually(lambda: read_vitals(process.pid).held_up == busy)
    finally:
        process.kill()
        process.wait()
