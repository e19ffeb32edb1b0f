"""What is measured of what came and went."""

import pytest

from penstock.service.rates import WINDOW, RateMeter


def test_a_pace_is_measured_while_there_is_something_to_do():
    pace = RateMeter()
    assert pace.rate(5) == 0
    pace.begin(100)
    for second in range(1, 5):
        pace.count(100 + second, 30)
    pace.begin(103)  # it had begun
    assert pace.rate(104) == pytest.approx(30)
    pace.rest(104)
    assert pace.rate(5000) == pytest.approx(30), "nothing to do is not slow"
    pace.begin(5000)
    pace.count(5000.1, 1)
    assert pace.rate(5000.2) == pytest.approx(30), "too early to know better"
    for tenth in range(1, 300):
        pace.count(5000 + tenth / 10, 1)
    assert pace.rate(5030) == pytest.approx(10, rel=0.02)
    assert len(pace._done) <= 10 * WINDOW + 1
