"""The scheduler's state machine, for minutes instead of seconds."""

import pytest
from hypothesis import HealthCheck, settings

from tests.sched.test_scheduler import SchedulerMachine


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(
        max_examples=1500, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
