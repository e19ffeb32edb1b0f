"""An instance by itself: what it measures and says of itself."""

from collections import defaultdict
from itertools import pairwise

import pytest
from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import CacheDelta, Snapshot
from penstock.kv.cache_log import LATEST, SOONEST
from penstock.sched.local import Scheduler
from penstock.sched.local.intake import Intake
from penstock.sched.local.limits import SOON
from penstock.service.events import FromEngine
from penstock.service.master import Master
from penstock.sim import cluster, instance
from tests.sim.scenarios import ONE_LINE, REQUESTS, SPLIT, WORKLOAD, read, run, work


def test_an_instance_measures_its_requests_and_its_steps():
    _, whole = run(read(WORKLOAD.replace("noise: 0.1", "noise: 0"), SPLIT))
    seen = {name: place.instance.intake.snapshot() for name, place in whole.places.items()}
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
        def joined(self, request, frontend, generation):
            super().joined(request, frontend, generation)
            joined[request.id] = self.scheduler.sequence(request.id).spent

    def migrated(scheduler, request_id):
        spent[request_id] = scheduler.sequence(request_id).spent
        scheduler.cancel(request_id)

    monkeypatch.setattr(instance, "Intake", Witness)
    monkeypatch.setattr(Scheduler, "migrated", migrated)
    run(read(WORKLOAD, SPLIT), scale=0.3)
    assert joined
    assert all(spent[name] == times for name, times in joined.items())
    assert all(queue >= 0 and prefill > 0 for queue, prefill, _ in joined.values())


@pytest.mark.parametrize("late_ms", [0, 5, 2600])  # with the last, several reports are under way at once
def test_a_master_hears_every_report_of_idle_instances_whatever_comes_between(monkeypatch, late_ms):
    heard = defaultdict(list)

    class Witness(Master):
        def tick(self, now, happening=None):
            match happening:
                case FromEngine(name, Snapshot() as load):
                    heard[name].append((now - late_ms / 1e3 - 0.2e-3, load.sequence))
            return super().tick(now, happening)

    monkeypatch.setattr(cluster, "Master", Witness)
    died = 4.03
    workload = WORKLOAD.replace(f"requests: {REQUESTS}, rate: 60", "requests: 12, rate: 1")
    more = f"status-reports: {{every-ms: 100, delay-ms: {late_ms}}}\nfailures: [{{instance: engine-1, at: {died}}}]\n"
    run(read(workload, "instances: [{count: 3}]\n", more))
    assert heard.keys() == {"engine-0", "engine-1", "engine-2"}
    for reports in heard.values():
        assert [number for _, number in reports] == list(range(1, len(reports) + 1))
        assert max(after - before for (before, _), (after, _) in pairwise(reports)) < instance.IDLE_REPORT + 0.1
    assert died - instance.IDLE_REPORT - 0.1 < heard["engine-1"][-1][0] < died, "and what a dying one has said"


def test_it_tells_of_its_cache_as_an_engine_does(monkeypatch):
    """A prompt at once, and what a request that has ended leaves; what decoding adds, block by block, is gathered."""
    told = []

    class Witness(Master):
        def tick(self, now, happening=None):
            match happening:
                case FromEngine(_, CacheDelta(whole=False) as delta):
                    told.append((now, len(delta.added)))
            return super().tick(now, happening)

    monkeypatch.setattr(cluster, "Master", Witness)
    scenario = read(ONE_LINE.replace("count: 2", "count: 1"))
    _, whole = run(scenario, "unified", trace=[work(0, prompt=200, output=3000)])
    whole.settle(1.0)
    (record,) = whole.records
    soon, late = SOONEST + 0.02, LATEST + 0.02
    assert record.received == 3000
    assert sum(count for _, count in told) == (200 + 3000 - 1) // BLOCK_TOKENS
    (first, blocks), *between, (last, _) = told
    assert blocks == 200 // BLOCK_TOKENS
    assert record.first < first < record.first + soon
    assert record.ended < last < record.ended + soon
    times = [first, *(at for at, _ in between)]
    assert len(times) > 2
    assert all(LATEST <= after - before < late for before, after in pairwise(times))


def test_an_online_request_ends_a_step_of_offline_ones(monkeypatch):
    """Soon, where it would run on for long; the simulated engine says as the real one that nothing of it counts."""
    scenario = read(ONE_LINE.replace("count: 2", "count: 1").replace("ttft-ms: 1000", "ttft-ms: 30"))
    seen = {}
    for soon in (SOON, 10.0):  # with the other no step is ended
        monkeypatch.setattr(instance, "SOON", soon)
        offline = replace(work(0, prompt=6000, output=3), offline=True)
        result, whole = run(scenario, trace=[offline, work(1, at=0.03, prompt=20, output=3)])
        (place,) = whole.places.values()
        seen[soon] = place.instance.scheduler.counters.interruptions, result["attainment"]
    assert seen == {SOON: (1, 1.0), 10.0: (0, 0.0)}
