"""What an engine that has ended was computing."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.heartbeat import (
    LOADING,
    ROOM,
    BlackBox,
    Heartbeat,
    LastStep,
    box_of,
    forget,
    read_black_box,
    read_heartbeat,
)

IDS = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), min_size=1), max_size=5)


@given(st.lists(IDS, max_size=6), st.booleans(), st.integers(1, 2**62))
def test_it_says_what_the_last_step_was_of(tmp_path_factory, steps, fails, incarnation):
    path = tmp_path_factory.getbasetemp() / "box"
    assert read_black_box(path.with_name("none")) is None
    box = BlackBox(path, incarnation)
    assert read_black_box(path) == LastStep(incarnation, 0, False, ())
    for requests in steps:
        box.begin(requests)
        assert read_black_box(path).requests == tuple(requests)
    found = read_black_box(path)
    assert (found.incarnation, found.steps, found.failed) == (incarnation, sum(map(bool, steps)), False)
    assert found.broken(1) == found.broken(-signal.SIGKILL) == found.broken(-signal.SIGTERM) == ()
    assert found.broken(-signal.SIGSEGV) == found.broken(-signal.SIGABRT) == found.requests
    if fails:
        box.fail(["x"])
        assert read_black_box(path).broken(1) == ("x",)


@pytest.mark.parametrize("length", [60, 1000])
def test_ids_that_do_not_fit_are_left_out_and_not_cut(tmp_path, length):
    ids = [f"{i:0{length}}" for i in range(2 * ROOM // length)]
    box = BlackBox(tmp_path / "box", 1)
    box.begin(ids)
    found = read_black_box(tmp_path / "box").requests
    assert found == tuple(ids[: len(found)])
    assert len(found) >= ROOM // (length + 1) - 1
    box.begin(ids[:1])
    assert read_black_box(tmp_path / "box").requests == (ids[0],)


def test_the_next_process_needs_no_more_room_on_the_disk(tmp_path):
    """Its files are there, without holes, and say nothing of the last one."""
    beat, box = tmp_path / "beat", box_of(tmp_path / "beat")
    forget(beat)
    assert not beat.exists()
    for _ in range(2):
        Heartbeat(beat).beat()
        BlackBox(box, 1).begin(["a"])
        found = [(path.stat().st_ino, path.stat().st_blocks * 512 >= path.stat().st_size) for path in (beat, box)]
        assert all(whole for _, whole in found)
        forget(beat)
        assert [(path.stat().st_ino, True) for path in (beat, box)] == found
        assert read_black_box(box) is None
        assert read_heartbeat(beat) == LOADING
