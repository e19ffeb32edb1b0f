"""Who is started, stopped and killed, and when."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.service.supervisor import DRAIN_GRACE, STEADY, STOP_GRACE, Program, RestartPolicy, Supervisor

KV_POOL = Program(name="kv-pool", kind="kv_pool", command=())
ENGINES = [Program(name=f"engine-{i}", kind="engine", command=(), needs="kv-pool") for i in range(2)]
MASTER = Program(name="master", kind="master", command=())
FRONTEND = Program(name="frontend-0", kind="frontend", command=())
PROGRAMS = [KV_POOL, *ENGINES, MASTER, FRONTEND]


def supervisor(programs=PROGRAMS, backoff=1.0, limit=3):
    return Supervisor(programs, RestartPolicy(backoff=backoff, limit=limit, heartbeat_timeout=5), drain_timeout=20)


def said(supervisor, now):
    return [f"{action.what} {action.name}" for action in supervisor.actions(now)]


def running():
    """A supervisor of which everything runs since 0."""
    fresh = supervisor()
    said(fresh, 0)
    fresh.is_up("kv-pool", 0)
    said(fresh, 0)
    return fresh


def test_engines_start_when_their_kv_pool_server_can_be_reached():
    fresh = supervisor()
    assert said(fresh, 0) == ["start kv-pool", "start master", "start frontend-0"]
    assert said(fresh, 1) == []
    fresh.is_up("kv-pool", 0)
    assert said(fresh, 1) == ["start engine-0", "start engine-1"]
    assert said(fresh, 1) == []


def test_one_that_dies_is_started_again_later_and_later():
    now, ours = 10.0, running()
    for delay in (1, 2, 4):
        assert f"SIGKILL and starts again in {delay} s" in ours.exited("engine-0", -9, now)
        assert said(ours, now + delay - 0.01) == []
        assert said(ours, now + delay) == ["start engine-0"]
        now += delay
    sentence = ours.exited("engine-0", 1, now)
    assert "engine-0 ended 4 times in a row, the last time with exit code 1; it is given up" in sentence
    assert not ours.stopping, "the other one serves on"
    assert said(ours, now + 1000) == []
    for _ in range(3):
        ours.exited("engine-1", -9, now)
        now += 10
        said(ours, now)
    ours.exited("engine-1", -9, now)
    assert ours.stopping, "nobody is left"
    assert ours.exit_code == 1
    assert said(ours, now) == ["stop frontend-0"]


def test_the_delay_has_a_bound():
    ours = supervisor([MASTER], limit=99)
    now = 0.0
    for _ in range(12):
        said(ours, now)
        ours.exited("master", 1, now)
        assert said(ours, now + 30) == ["start master"]
        now += 30


def test_a_long_run_makes_the_deaths_before_it_forgotten():
    now, ours = 0.0, supervisor([MASTER], limit=1)
    for _ in range(5):
        assert said(ours, now) == ["start master"]
        now += STEADY
        assert "starts again in 1 s" in ours.exited("master", 1, now)
        now += 1


def test_with_limit_0_no_death_is_made_good():
    ours = supervisor([MASTER], limit=0)
    said(ours, 0)
    assert "master ended once, the last time with exit code 0" in ours.exited("master", 0, 1)
    assert said(ours, 1) == []
    assert (ours.over, ours.exit_code) == (True, 1)


def test_what_cannot_be_served_ends_the_deployment_at_once():
    ours = running()
    assert "exit code 2: it cannot be served" in ours.exited("engine-1", 2, 1)
    assert said(ours, 1) == ["stop frontend-0"]
    assert ours.exit_code == 2


def test_what_was_served_before_is_tried_again():
    """A restart may find less memory, or a port still taken, than there was at the start."""
    ours = supervisor([replace(ENGINES[0], needs=None, socket=Path("engine-0")), FRONTEND])
    said(ours, 0)
    ours.is_up("engine-0", 0)
    assert "SIGKILL and starts again in 1 s" in ours.exited("engine-0", -9, 1000)
    now = 1001.0
    for delay in (2, 4):
        assert said(ours, now) == ["start engine-0"]
        assert f"exit code 2 and starts again in {delay} s" in ours.exited("engine-0", 2, now)
        now += delay
    said(ours, now)
    assert "ended 4 times in a row, the last time with exit code 2" in ours.exited("engine-0", 2, now)
    assert ours.exit_code == 1


def test_a_long_start_is_no_service():
    """Loading may take minutes before it turns out that nothing fits; one without a socket shows by its life."""
    ours = supervisor([replace(MASTER, socket=Path("master")), FRONTEND])
    said(ours, 0)
    assert "starts again" in ours.exited("frontend-0", 2, STEADY)
    assert "it cannot be served" in ours.exited("master", 2, STEADY)


def test_a_long_start_is_no_success():
    ours = supervisor([replace(ENGINES[0], needs=None, socket=Path("engine-0"))], limit=2)
    now = 0.0
    for _ in range(3):
        said(ours, now)
        ours.is_up("engine-0", now + 10 * STEADY)
        now += 10 * STEADY + 1
        sentence = ours.exited("engine-0", -9, now, "out of memory")
        now += 100
    assert sentence.endswith("3 times in a row, the last time with SIGKILL; its last output: out of memory")


def test_one_that_hangs_is_killed_and_that_is_a_death():
    ours = running()
    ours.hangs("engine-0", "no heartbeat for 10 s, it does nothing")
    (kill,) = ours.actions(5)
    assert (kill.what, kill.name) == ("kill", "engine-0")
    assert kill.why == "it hangs: no heartbeat for 10 s, it does nothing"
    assert said(ours, 5) == []
    told = ours.exited("engine-0", -9, 5)
    assert told == "engine-0 ended with SIGKILL (no heartbeat for 10 s, it does nothing) and starts again in 1 s"
    assert said(ours, 6) == ["start engine-0"]


def test_one_that_hangs_while_all_is_stopped_is_not_waited_for():
    ours = running()
    ours.stop(1)
    assert said(ours, 1) == ["stop frontend-0"]
    ours.hangs("engine-0", "no heartbeat for 10 s")
    assert said(ours, 2) == ["kill engine-0"], "its requests go on elsewhere"
    ours.exited("engine-0", -9, 2)
    ours.exited("frontend-0", 0, 3)
    assert said(ours, 100) == ["stop master"]
    assert ours.exit_code == 0


def test_an_engine_that_loads_hears_nobody_and_is_killed():
    ours = supervisor([replace(ENGINES[0], needs=None, socket=Path("engine-0"))])
    said(ours, 0)
    ours.stop(1)
    assert said(ours, 1) == ["kill engine-0"]
    ours.exited("engine-0", -9, 1)
    said(ours, 1)
    assert (ours.over, ours.exit_code) == (True, 0)


def test_a_crash_is_no_success_also_when_all_was_to_end():
    ours = running()
    ours.stop(1)
    said(ours, 1)
    ours.exited("frontend-0", -11, 2)
    assert (ours.exit_code, ours.failure) == (1, "frontend-0 ended with SIGSEGV while everything was stopped")


def test_engines_do_not_outlive_their_kv_pool_server():
    ours = running()
    ours.exited("kv-pool", -9, 5)
    assert said(ours, 5) == ["kill engine-0", "kill engine-1"]
    assert said(ours, 5) == []
    assert "because of kv-pool" in ours.exited("engine-0", -9, 5.1)
    assert said(ours, 5.9) == [], "the KV pool server is not back"
    assert said(ours, 6) == ["start kv-pool"]
    ours.is_up("kv-pool", 6)
    assert said(ours, 6.1) == ["start engine-0"]
    ours.exited("engine-1", -9, 6.2)
    assert said(ours, 6.2) == ["start engine-1"], "it was not its fault, so it need not wait"


def test_a_kv_pool_server_that_hangs_is_killed_and_its_engines_are_not_blamed():
    """They wait for it, and may end for it, before it is found out; that does not use up their restarts."""
    ours, now = running(), 5.0
    for _ in range(3):  # as often as anything may fail here
        ours.suspect("kv-pool", "no heartbeat for 3 s")
        ours.hangs("engine-0", "no heartbeat for 10 s")
        assert said(ours, now) == []
        assert "because of kv-pool" in ours.exited("engine-1", 1, now)
        assert said(ours, now + 1) == [], "it would only wait again"
        ours.hangs("kv-pool", "no heartbeat for 5 s")
        assert said(ours, now + 2) == ["kill kv-pool"]
        told = ours.exited("kv-pool", -9, now + 2)
        assert told.startswith("kv-pool ended with SIGKILL (no heartbeat for 5 s) and starts again")
        assert said(ours, now + 2) == ["kill engine-0"]
        assert "because of kv-pool" in ours.exited("engine-0", -9, now + 2)
        now += 10
        assert said(ours, now) == ["start kv-pool"]
        ours.is_up("kv-pool", now)
        assert sorted(said(ours, now)) == ["start engine-0", "start engine-1"]
    assert "and starts again in 1 s" in ours.exited("engine-1", 1, now), "its first failure"
    assert said(ours, now + 1) == ["start engine-1"]
    ours.suspect("kv-pool", "no heartbeat for 3 s")
    ours.suspect("kv-pool", "")
    assert "and starts again in 2 s" in ours.exited("engine-1", 1, now + 1)


def test_engines_are_in_trouble_by_the_name_of_who_is_to_blame():
    ours = running()
    assert ours.troubles == {}
    ours.suspect("kv-pool", "no heartbeat for 3 s")
    assert ours.troubles == {f"engine-{i}": "kv-pool hangs: no heartbeat for 3 s" for i in range(2)}
    ours.suspect("kv-pool", "")
    ours.suspect("engine-1", "no heartbeat for 4 s")
    ours.suspect("master", "no heartbeat for 4 s")  # which the frontends see by themselves
    assert ours.troubles == {"engine-1": "engine-1 hangs: no heartbeat for 4 s"}
    ours.suspect("engine-1", "")
    ours.exited("kv-pool", -11, 5)
    ours.exited("engine-0", 1, 5)
    gone = "kv-pool ended with SIGSEGV and starts again in 1 s"
    assert ours.troubles == {"engine-0": gone, "engine-1": gone}
    said(ours, 6)
    ours.is_up("kv-pool", 6)
    assert ours.troubles == {"engine-0": "engine-0 ended with exit code 1 because of kv-pool, and starts again"}
    said(ours, 6)
    ours.is_up("engine-0", 6)
    assert ours.troubles == {}


def test_stopping_goes_from_the_clients_to_the_memory():
    ours = running()
    ours.exited("master", 1, 1)  # about to start again, which it no longer does
    ours.stop(1)
    assert said(ours, 1) == ["stop frontend-0"]
    assert said(ours, 1 + 20 + DRAIN_GRACE - 0.1) == [], "requests may finish"
    ours.exited("frontend-0", 0, 20)
    assert said(ours, 20) == ["stop engine-0", "stop engine-1"]
    ours.exited("engine-0", 0, 20)
    assert said(ours, 20 + STOP_GRACE) == ["kill engine-1"]
    assert said(ours, 21 + STOP_GRACE) == []
    ours.exited("engine-1", -9, 26)
    assert said(ours, 26) == ["stop kv-pool"]
    ours.exited("kv-pool", 0, 26)
    assert said(ours, 26) == []
    assert (ours.over, ours.exit_code, ours.failure) == (True, 0, "")


def test_a_frontend_that_does_not_drain_in_time_is_killed():
    ours = running()
    ours.stop(0)
    said(ours, 0)
    assert said(ours, 20 + DRAIN_GRACE) == ["kill frontend-0"]


def test_a_second_signal_hurries():
    ours = running()
    ours.stop(0)
    said(ours, 0)
    ours.stop(1)
    assert said(ours, 1) == ["stop frontend-0"]
    assert said(ours, 1 + STOP_GRACE) == ["kill frontend-0"]


events = st.lists(
    st.tuples(
        st.sampled_from([p.name for p in PROGRAMS]),
        st.sampled_from(["exit 0", "exit 1", "exit -9", "exit 2", "up", "stop"]),
        st.floats(0, 40),
    ),
    max_size=60,
)


@given(events)
def test_whatever_happens_it_starts_what_does_not_run_and_ends(events):
    ours, alive, now, ended = supervisor(), set(), 0.0, False

    def act():
        for action in ours.actions(now):
            if action.what == "start":
                assert not ended, "nothing starts any more once it is to stop"
                assert action.name not in alive
                assert not action.name.startswith("engine") or "kv-pool" in alive
                alive.add(action.name)
            else:
                assert action.name in alive
                if action.what == "kill":
                    alive.remove(action.name)
                    ours.exited(action.name, -9, now)

    for name, what, later in events:
        now += later
        act()
        if what == "stop":
            ours.stop(now)
        elif what == "up" and name in alive:
            ours.is_up(name, now)
        elif what.startswith("exit") and name in alive:
            alive.remove(name)
            ours.exited(name, int(what.split()[1]), now)
        ended = ours.stopping
    ours.stop(now)
    ended = True
    for _ in range(60):
        act()
        now += STOP_GRACE
    assert ours.over
    assert not alive
    assert (ours.exit_code == 0) == (ours.failure == "")


@pytest.mark.parametrize(("code", "word"), [(3, "exit code 3"), (-15, "SIGTERM"), (-200, "signal 200")])
def test_how_it_ended_is_told(code, word):
    assert f"master ended with {word}" in running().exited("master", code, 1)


def test_a_program_is_stopped_and_started_again():
    """That is no death, and a stop for good has the last word."""
    ours = running()
    ours.retire("master", 1, again=True)
    assert said(ours, 1) == ["stop master"]
    ours.retire("master", 1.1, again=True)
    assert said(ours, 1.1) == []
    assert ours.exited("master", 0, 2) == "master was stopped, and starts again"
    assert not ours.is_stopped("master")
    assert said(ours, 2) == ["start master"]
    ours.retire("master", 3, again=True)
    ours.retire("master", 3)
    ours.retire("master", 3, again=True)
    assert said(ours, 3) == ["stop master"]
    assert ours.exited("master", 0, 4) == "master was stopped"
    ours.retire("master", 5, again=True)
    assert said(ours, 5) == []
    assert ours.is_stopped("master")


def test_a_program_by_itself_is_stopped_and_started_as_it_is_told():
    spare = replace(ENGINES[1], needs=None, socket=Path("e"), starts=False)
    ours = supervisor([MASTER, spare])
    assert said(ours, 0) == ["start master"]
    assert ours.is_stopped("engine-1")
    ours.start("engine-1", 1)
    assert said(ours, 1) == ["start engine-1"]
    ours.is_up("engine-1", 1)
    ours.start("engine-1", 2)
    ours.retire("engine-1", 3)
    assert said(ours, 3) == ["stop engine-1"]
    ours.retire("engine-1", 4)
    assert not ours.is_stopped("engine-1")
    assert said(ours, 3 + STOP_GRACE - 0.1) == []
    assert said(ours, 3 + STOP_GRACE) == ["kill engine-1"]
    assert ours.exited("engine-1", -9, 9) == "engine-1 was stopped"
    assert ours.is_stopped("engine-1")
    assert not ours.troubles
    assert said(ours, 100) == []
    ours.start("engine-1", 100)
    assert said(ours, 100) == ["start engine-1"]
    ours.exited("engine-1", 1, 100)
    assert not ours.is_stopped("engine-1"), "it failed, and starts again"
    ours.retire("engine-1", 100)
    assert ours.is_stopped("engine-1")
    assert said(ours, 200) == []
    ours.start("engine-1", 200)
    said(ours, 200)
    ours.retire("engine-1", 201)
    assert said(ours, 201) == ["kill engine-1"], "it is loading"
    ours.exited("engine-1", -9, 201)
    ours.stop(300)
    ours.start("engine-1", 300)
    assert said(ours, 300) == ["stop master"]
    ours.exited("master", 0, 300)
    assert said(ours, 300) == []
    assert ours.over


def of_model(name):
    return [
        Program(name=f"{name}/master", kind="master", command=(), model=f"{name}/"),
        Program(name=f"{name}/engine-0", kind="engine", command=(), model=f"{name}/"),
    ]


@pytest.mark.parametrize("failed", ["master", "engine-0"])
@pytest.mark.parametrize("code", [1, 2])
def test_a_model_that_fails_for_good_leaves_the_others_serving(failed, code):
    ours = supervisor([*of_model("a"), *of_model("b"), FRONTEND], limit=0)
    said(ours, 0)
    sentence = ours.exited(f"a/{failed}", code, 1)
    assert sentence.endswith("; a is given up, and the other models serve on")
    assert not ours.stopping
    assert said(ours, 1000) == []
    last = ours.exited(f"b/{failed}", code, 2)
    assert (ours.stopping, ours.exit_code, ours.failure) == (True, code, last)


def test_without_a_frontend_there_is_nothing_whatever_the_models_do():
    ours = supervisor([*of_model("a"), *of_model("b"), FRONTEND], limit=0)
    said(ours, 0)
    ours.exited("frontend-0", 1, 1)
    assert ours.stopping
