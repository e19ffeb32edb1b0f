"""Where an engine's sequences are."""

from collections.abc import Callable

import pytest

from penstock.kv.pool import BlockPool
from penstock.sched.local import Limits, Scheduler
from penstock.sched.local.batcher import Queues
from penstock.sched.local.sequence import Sequence
from tests.helpers.engines import make_request


def sequence(number: int, *, blocks: int = 0, computed: int = 0) -> Sequence:
    made = Sequence(make_request(f"r{number}", [1] * 100), number, 0.0)
    made.blocks, made.computed = list(range(blocks)), computed
    return made


def filled() -> tuple[Queues, list[Sequence]]:
    """One of each: it runs, prefilled or not, ends, waits, awaits blocks, is loaded, is to be seen, and leaves."""
    computed = (99, 40, 99, 0, 0, 0, 0, 99)
    made = [sequence(i, blocks=2 * (tokens > 0), computed=tokens) for i, tokens in enumerate(computed)]
    decodes, prefills, ends, waits, awaits, loads, sees, leaves = made
    queues = Queues({ends.id: ends}, {loads.id: loads}, {sees.id: sees})
    for each in made:
        queues.add(each)
    queues.running += [decodes, prefills]
    queues.waiting.add(waits)
    queues.awaiting[awaits.id] = awaits
    queues.migrating[leaves.id] = leaves
    return queues, made


def test_all_are_counted_once():
    queues, made = filled()
    queues.check()
    assert (queues.num_running, queues.num_waiting, len(queues.migrating)) == (3, 4, 1)
    assert queues.tokens_due() == (400, 60, 99 + 40 + 99 + 99)
    assert queues.rows == 4
    assert {*queues.holding, *queues.waiting, *queues.elsewhere} == set(made)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda queues, made: queues.running.pop(),
        lambda queues, made: queues.running.append(made[7]),
        lambda queues, made: queues.waiting.add(sequence(9)),
        lambda queues, made: queues.pop(made[3].id),
        lambda queues, made: made[0].blocks.clear(),
        lambda queues, made: queues.alone.update(r9=sequence(9)),
    ],
    ids=["it is nowhere", "in two", "unknown", "over and it waits", "it runs without blocks", "unknown and alone"],
)
def test_check_tells_of_one_that_is_nowhere_or_in_two_queues(wrong: Callable[[Queues, list[Sequence]], object]):
    queues, made = filled()
    wrong(queues, made)
    with pytest.raises(AssertionError):
        queues.check()


def test_more_than_may_run_at_once_are_told_of():
    limits = Limits(token_budget=64, max_sequences=2, max_model_len=128)
    scheduler = Scheduler(limits, BlockPool(range(8)))
    for number in range(2):
        scheduler.add(make_request(f"r{number}", [number] * 10))
    scheduler.schedule()
    scheduler.check()
    scheduler.limits = Limits(token_budget=64, max_sequences=1, max_model_len=128)
    with pytest.raises(AssertionError):
        scheduler.check()
