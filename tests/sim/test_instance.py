"""An instance by itself: what it measures and says of itself."""

import pytest

from penstock.sched.local.intake import Intake
from penstock.sched.local.load import snapshot
from penstock.sim import instance
from tests.sim.scenarios import SPLIT, WORKLOAD, read, run


def test_an_instance_measures_its_requests_and_its_steps():
    _, cluster = run(read(WORKLOAD.replace("noise: 0.1", "noise: 0"), SPLIT))
    seen = {name: snapshot(place.instance.intake) for name, place in cluster.places.items()}
    reads, goes_on = seen["prefill-0"], seen["decode-0"]
    assert reads.ttft_ms > 0
    assert goes_on.tpot_ms > 0
    assert goes_on.ttft_ms is None  # who came by hand-off had answered
    assert 0 < goes_on.interval_ms < 30
    for load in (reads, goes_on):
        assert load.factors
        assert all(factor == pytest.approx(1.0) for factor in load.factors.values())


def test_a_request_that_is_handed_over_takes_the_times_it_spent_with_it(monkeypatch):
    spent, joined = {}, {}

    class Witness(Intake):
        def spent(self, request_id):
            spent[request_id] = super().spent(request_id)
            return spent[request_id]

        def joined(self, now, request, frontend, generation, queue, prefill):
            joined[request.id] = (queue, prefill)
            super().joined(now, request, frontend, generation, queue, prefill)

    monkeypatch.setattr(instance, "Intake", Witness)
    run(read(WORKLOAD, SPLIT), scale=0.3)
    assert joined
    assert all(spent[name] == times for name, times in joined.items())
    assert all(queue >= 0 and prefill > 0 for queue, prefill in joined.values())
