"""The scheduler's state machine, for minutes instead of seconds."""

import pytest
from hypothesis import settings

from tests.sched.test_scheduler import SchedulerMachine


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=60)
