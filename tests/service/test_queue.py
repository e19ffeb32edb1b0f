"""Who waits at the master."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.wire.master import Place
from penstock.sched.cluster.columns import QueueColumns
from penstock.service.queue import MEMORY, MasterQueue, Tracked, WaitQueue
from tests.helpers.policies import demand

names = st.integers(0, 7)
come = st.tuples(st.just("come"), names, st.integers(1, 5), st.booleans())


@given(st.lists(st.one_of(come, st.tuples(st.just("go"), names, st.just(0), st.just(False))), max_size=40))
def test_it_is_in_order_of_arrival_and_knows_for_whom_not_everybody_will_do(actions):
    queue, whole, plain, before = WaitQueue(shown=3), WaitQueue(), {}, None
    columns = QueueColumns(lambda d: d.prompt_tokens)
    for what, name, length, picky in actions:
        key = ("f", str(name))
        gone = queue.pop(key)
        assert whole.pop(key) == gone
        assert (gone and gone.demand) is plain.pop(key, None)
        if what == "come":
            one = demand(str(name), length, 0, priority=length % 3, exclude=frozenset({"i0"} if picky else ()))
            queue[key] = whole[key] = Tracked(one, None, 0.0)
            plain[key] = one
        queue.check()
        assert list(whole.demands) == list(plain.values())
        assert columns.of(whole.demands)[0].tolist() == [one.prompt_tokens for one in plain.values()]
        shown = queue.demands
        assert list(shown) == list(plain.values())[:3]
        assert before is None or list(before[0]) == before[1], "a view does not change"
        before = shown, list(shown)
        for shortest in range(6):
            wanted = [key for key, one in plain.items() if one.tokens > shortest or one.exclude]
            assert list(queue.doubtful(shortest)) == wanted


def test_what_has_come_and_gone_is_not_kept_for_ever():
    queue, columns = WaitQueue(), QueueColumns(lambda d: d.prompt_tokens)
    histories = set()
    for number in range(3 * MEMORY):
        queue[("f", str(number))] = Tracked(demand(str(number), number), None, 0.0)
        line = queue.demands
        assert len(line.history) <= MEMORY + 2
        histories.add(id(line.history))
        assert columns.of(line).tolist() == [[number]]
        assert queue.pop(("f", str(number))) is not None
    assert len(histories) > 1


def test_what_the_master_cannot_place_now_is_set_aside_and_is_in_one_place():
    queue = MasterQueue()
    for name, offline in (("r", False), ("s", True), ("t", False)):
        asked = demand(name, 50, exclude=frozenset("a" * (name != "t")))
        sequence = Tracked(asked, Place(name, 50, 10, [], offline=offline), -inf)
        queue.queue_for(sequence)[sequence.demand.key] = sequence
    assert (len(queue.online), len(queue.offline), len(queue)) == (2, 1, 3)
    assert [key[1] for key, _ in queue.doubtful(1000)] == ["r", "s"], "some instance cannot take them"
    queue.set_aside(("f", "s"))
    queue.check()
    assert (list(queue.unplaceable), len(queue.offline), len(queue)) == ([("f", "s")], 0, 3)
    assert {key[1] for key in queue} == {"r", "s", "t"}
    assert queue.get(("f", "s")) is queue.pop(("f", "s")) is not None
    assert queue.get(("f", "s")) is None
    queue.unplaceable["f", "t"] = queue.online["f", "t"]
    with pytest.raises(AssertionError):
        queue.check()
