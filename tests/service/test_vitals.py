"""Who gets on and who does not, by heartbeat and by what the kernel says."""

import os
import signal
import subprocess
import sys
from math import inf

import pytest

from penstock.core.heartbeat import LOADING, STILL, STILL_LOADING, TURN, Beat, Heartbeat, read_heartbeat, step_limit
from penstock.service.launcher import LONGEST_LOOK, MOVED, Vitals, Watch, read_vitals
from tests.helpers.waiting import eventually


def watched(beat, vitals_at, seconds):
    """(when, why) a process with one beat is given up; None when it is not."""
    watch = Watch(0.0)
    assert watch.beats(0.0, beat)
    for now in range(1, seconds):
        assert not watch.beats(now, beat)
        if why := watch.trouble(now, vitals_at(now)):
            return now, why
    return None


def idle(now):
    return Vitals()


def computing(now):
    return Vitals(cpu=0.9 * now)


@pytest.mark.parametrize(
    ("beat", "vitals_at", "when", "why"),
    [
        (Beat(7, TURN, STILL), idle, STILL, "done nothing"),
        (Beat(7, 500.0, STILL), computing, 500, "one step has taken"),  # a long step that computes is given its time
        (Beat(7, 500.0, STILL), lambda now: Vitals(cpu=min(now, 40)), 40 + STILL, "done nothing"),
        (Beat(7, 500.0, STILL), lambda now: Vitals(cpu=0.001 * now), STILL, "done nothing"),  # it only answers the wire
        (Beat(7, 500.0, STILL), lambda now: Vitals(cpu=0.02 * now), 500, "one step"),  # a crowded machine
        (Beat(7, 500.0, 500.0), idle, 500, "one step|done nothing"),  # a GPU computes
        (Beat(7, 500.0, 500.0), lambda now: Vitals(stopped=True), STILL, "a signal"),
        (LOADING, lambda now: Vitals(stopped=True), STILL, "a signal"),
        (LOADING, idle, STILL_LOADING, "done nothing"),
    ],
)
def test_when_it_is_given_up(beat, vitals_at, when, why):
    found = watched(beat, vitals_at, 1000)
    assert found is not None
    assert when < found[0] <= when + 2
    assert any(part in found[1] for part in why.split("|"))


@pytest.mark.parametrize("vitals_at", [computing, lambda now: Vitals(faults=now // 30), lambda now: Vitals(0.01 * now)])
def test_loading_may_take_its_time(vitals_at):
    assert watched(LOADING, vitals_at, 5000) is None


def test_a_beat_starts_all_anew_and_a_pause_of_the_watch_counts_for_nothing():
    watch = Watch(0.0)
    for now in range(0, 1000, 9):
        assert watch.beats(now, Beat(now + 1, TURN, STILL))
        assert watch.trouble(now + 1, Vitals(stopped=True)) == ""
    watch.beats(1000, Beat(1, TURN, STILL))
    assert watch.trouble(10_000, Vitals(stopped=True)) == "", "whoever watches was stopped as well"
    assert LONGEST_LOOK < STILL


def test_the_heartbeat_says_what_a_step_may_take(tmp_path):
    path = tmp_path / "heartbeat"
    assert read_heartbeat(path) == LOADING
    assert LOADING.limit == inf
    heartbeat = Heartbeat(path, "cpu")
    assert read_heartbeat(path) == LOADING, "it has not begun"
    heartbeat.beat()
    assert read_heartbeat(path) == Beat(1, TURN, STILL)
    heartbeat.beat(512)
    assert read_heartbeat(path) == Beat(2, step_limit(512, "cpu"), STILL)
    gpu = Heartbeat(path, "cuda:0")
    gpu.beat(512)
    beat = read_heartbeat(path)
    assert beat.still == beat.limit == step_limit(512, "cuda:0") < step_limit(512, "cpu")


def test_the_vitals_of_a_process_and_of_what_it_started():
    """A compiler that an engine waits for works for the engine."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", script], process_group=0)
    try:
        eventually(lambda: read_vitals(process.pid).cpu > 2 * MOVED)
        assert not read_vitals(process.pid).stopped
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: read_vitals(process.pid).stopped)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    eventually(lambda: read_vitals(process.pid) == Vitals())
