"""The order of `unified`'s queue: what is kept from one question to the next changes nothing about it."""

from copy import deepcopy
from heapq import heappop, heappush
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sched.cluster import ClusterView
from penstock.sched.cluster.slack_order import LOOK, MARGIN, PATIENCE, RETHINK, SHARE, SlackOrder
from tests.helpers.policies import demand, instance


class Plain:
    """The same by its definition, over the whole queue each time."""

    def __init__(self):
        self.order, self.made_at, self.newest, self.seconds, self.overdue, self.owed = [], -inf, None, {}, None, 0.0

    def of(self, view):
        same = len(view.queue) == len(self.order) and view.queue[-1] == self.newest
        if not same or view.now - self.made_at >= RETHINK:
            self.made_at, self.newest = view.now, view.queue[-1]
            self.order = self.make(view)
        return self.order[:LOOK]

    def take(self, place):
        gone = self.order.pop(place)
        seconds = self.seconds.pop(gone.key)
        if gone.key == self.overdue:
            self.overdue, self.owed = None, seconds / SHARE
        else:
            self.owed -= seconds
        if gone == self.newest:
            self.newest = None

    def make(self, view):
        waiting = sorted(view.queue, key=lambda d: (d.priority, d.deadline, d.arrived))
        prefiller = view.instances[0]
        self.seconds = {d.key: self.seconds.get(d.key) or prefiller.queued_seconds(d.prompt_tokens) for d in waiting}
        kept, longest = set(), []
        end = sum(i.free_at - view.now for i in view.instances if i.free_at > view.now)
        for place, one in enumerate(waiting):
            slack = one.arrived + one.ttft * MARGIN - view.now
            if self.seconds[one.key] > slack:
                continue
            kept.add(place)
            heappush(longest, (-self.seconds[one.key], place))
            end += self.seconds[one.key]
            while end / len(view.instances) > slack and longest:
                less, gone = heappop(longest)
                end += less
                kept.discard(gone)
        late = sorted((d for k, d in enumerate(waiting) if k not in kept), key=lambda d: (d.priority, d.arrived))
        in_time = [d for k, d in enumerate(waiting) if k in kept]
        self.overdue = None
        untargeted = [d for d in in_time if d.ttft == inf]
        oldest = min([*late, *untargeted], key=lambda d: (d.arrived, d.priority), default=None)
        if oldest is None or self.owed > 0:
            return [*in_time, *late]
        if view.now - oldest.arrived > (PATIENCE if oldest.ttft == inf else max(PATIENCE, 2 * oldest.ttft)):
            self.overdue = oldest.key
            return [oldest, *(d for d in (*in_time, *late) if d is not oldest)]
        return [*in_time, *late]


come = st.tuples(
    st.just("come"),
    st.integers(1, 60_000),
    st.sampled_from([0.05, 0.5, 3.0, inf]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([0.0, 0.5, 20.0]),
)
step = st.one_of(
    come,
    st.tuples(st.just("take"), st.integers(0, LOOK)),
    st.tuples(st.just("copy")),
    st.tuples(st.just("take in vain"), st.integers(0, LOOK)),
    st.tuples(st.just("leave"), st.integers(0, 100)),
    st.tuples(st.just("again"), st.integers(0, 100)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.02, 0.06, 1.0, 9.0])),
)


@settings(max_examples=150)
@given(st.lists(st.lists(step, max_size=12), max_size=14), st.lists(st.floats(0.0, 2.0), min_size=1, max_size=3))
def test_it_is_that_of_the_definition(rounds, busy):
    order, plain, queue, now, number = SlackOrder(), Plain(), [], 100.0, 0
    for actions in rounds:
        for what, *values in actions:
            if what == "come":
                tokens, ttft, priority, waited = values
                queue.append(
                    demand(
                        f"{number}",
                        prompt_tokens=tokens,
                        ttft=ttft,
                        priority=priority,
                        arrived=now - waited + number * 1e-6,
                    )
                )
                number += 1
            elif what == "wait":
                now += values[0]
            elif what == "copy":
                order = deepcopy(order)
            elif queue and what in ("leave", "again"):
                gone = queue.pop(values[0] % len(queue))
                if what == "again":
                    queue.append(
                        demand(gone.key[1], prompt_tokens=gone.prompt_tokens, ttft=gone.ttft, arrived=gone.arrived)
                    )
            if not queue:
                continue
            instances = [instance(f"i{k}", free_at=now + seconds) for k, seconds in enumerate(busy)]
            view = ClusterView(now=now, instances=instances, queue=tuple(queue))
            shown, wanted = order.of(view), plain.of(view)
            assert [d.key for d in shown] == [d.key for d in wanted]
            if what in ("take", "take in vain"):  # the latter in a world where others decide
                place = values[0] % len(shown)
                if what == "take":
                    queue = [d for d in queue if d.key != shown[place].key]
                order.take(place)
                plain.take(place)


def test_the_newest_that_asks_again_with_something_else_is_seen_at_once():
    order, instances = SlackOrder(), [instance("i0", free_at=100.0)]
    first, newest = demand("0", ttft=1.0, arrived=100.0), demand("1", ttft=2.0, arrived=100.0)
    urgent = demand("1", ttft=0.5, arrived=100.0)
    assert order.of(ClusterView(now=100.0, instances=instances, queue=(first, newest))) == [first, newest]
    assert order.of(ClusterView(now=100.0, instances=instances, queue=(first, urgent))) == [urgent, first]
