"""Who waits at the master."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.service.queue import Queue, Waiting
from tests.helpers.policies import demand

names = st.integers(0, 7)
come = st.tuples(st.just("come"), names, st.integers(1, 5), st.booleans())


@given(st.lists(st.one_of(come, st.tuples(st.just("go"), names, st.just(0), st.just(False))), max_size=40))
def test_it_is_in_order_of_arrival_and_knows_for_whom_not_everybody_will_do(actions):
    queue, plain, before = Queue(shown=3), {}, None
    for what, name, length, picky in actions:
        key = ("f", str(name))
        gone = queue.pop(key)
        assert (gone and gone.demand) is plain.pop(key, None)
        if what == "come":
            one = demand(str(name), length, 0, exclude=frozenset({"i0"} if picky else ()))
            queue[key] = Waiting(one, None)
            plain[key] = one
        queue.check()
        shown = queue.demands
        assert list(shown) == list(plain.values())[:3]
        assert before is None or list(before[0]) == before[1], "a view does not change"
        before = shown, list(shown)
        for shortest in range(6):
            wanted = [key for key, one in plain.items() if one.tokens > shortest or one.exclude]
            assert list(queue.doubtful(shortest)) == wanted
