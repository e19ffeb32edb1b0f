"""Warm actors of Ray, by a script of what becomes of them; each question waits until it is answered."""

from concurrent.futures import Future

import pytest

from penstock.cli.ray_pool import AGAIN, LOOK, ROOM, RayWarmPool
from tests.helpers.waiting import eventually

SMALL, LARGE = {"CPU": 1}, {"CPU": 2, "GPU": 1}


class Script:
    def __init__(self, resources):
        self.resources, self.asked, self.waiting, self.said = resources, [], [], []

    def ask(self, method, *arguments):
        self.asked.append((method, *arguments))
        self.waiting.append(Future())
        return self.waiting[-1]

    def answer(self, **said):
        self.waiting[-1].set_result(said)

    def say_if_without_room(self):
        self.said.append("room")


class Pool:
    def __init__(self, size):
        self.made, self.ended, self.broken, self.now = [], [], False, 0.0
        self.pool = RayWarmPool(size, self.make, self.ended.append, lambda resources: {"for": resources})

    def make(self, resources):
        if self.broken:
            raise RuntimeError("the head has gone")
        self.made.append(Script(resources))
        return self.made[-1]

    def pass_(self, seconds=0.0):
        self.now += seconds
        self.pool.refill(self.now)

    def warm(self):
        """The last one that was made is."""
        self.made[-1].answer(node="10.0.0.2", pid=7)
        self.pass_()


@pytest.fixture
def pool():
    return Pool(2)


def test_one_after_another_is_made_and_taken_and_replaced(pool):
    pool.pass_()
    assert not pool.made, "it is not known yet what instances need"
    assert pool.pool.take(SMALL) is None
    pool.pass_()
    pool.pass_()
    assert [one.asked for one in pool.made] == [[("warm", {"for": SMALL})]], "beside engines that serve"
    pool.warm()
    pool.warm()
    pool.pass_()
    assert len(pool.made) == 2
    assert pool.pool.take(LARGE) is None, "another place than that was set apart"
    assert pool.pool.take(SMALL) is pool.made[0]
    pool.pass_()
    assert pool.made[2].resources == LARGE, "as many of each kind"
    pool.warm()
    assert pool.pool.take(LARGE) is pool.made[2]
    assert pool.pool.take(SMALL) is pool.made[1]
    assert not pool.ended
    pool.pass_()
    pool.pool.close()
    assert pool.ended == [pool.made[3]], "those that were taken are the takers'"


def test_who_has_ended_is_replaced_after_a_while(pool, caplog):
    pool.pool.take(SMALL)
    pool.pass_()
    pool.warm()
    pool.warm()
    pool.pass_(LOOK)
    for one in pool.made:
        assert one.asked[-1] == ("is_warm",)
    pool.made[0].answer()
    pool.made[1].answer(refused="Killed, on Ray node 10.0.0.2")
    pool.pass_()
    assert pool.ended == [pool.made[1]]
    assert "a warm actor of Ray's has ended, and is replaced: Killed, on Ray node 10.0.0.2" in caplog.text
    pool.pass_(AGAIN / 2)
    assert len(pool.made) == 2
    pool.pass_(AGAIN / 2)
    assert len(pool.made) == 3
    pool.made[2].waiting[-1].set_exception(RuntimeError("its node has gone\nand more"))
    pool.pass_()
    assert pool.ended == pool.made[1:]
    assert "is replaced: its node has gone\n" in caplog.text
    assert pool.pool.take(SMALL) is pool.made[0]


def test_an_instance_comes_before_who_waits_for_a_node(pool):
    pool.pool.take(SMALL)
    pool.pass_()
    pool.pass_(ROOM)
    eventually(lambda: pool.made[0].said)
    pool.pass_(ROOM)
    assert pool.made[0].said == ["room"], "once"
    assert pool.pool.take(SMALL) is None
    assert pool.ended == pool.made
    pool.pass_()
    assert len(pool.made) == 2


def test_without_ray_there_is_none_and_that_is_said(pool, caplog):
    pool.broken = True
    pool.pool.take(SMALL)
    pool.pass_()
    pool.pass_()
    assert caplog.text.count("Ray makes no warm actor: the head has gone") == 1
    pool.broken = False
    pool.pass_(AGAIN)
    assert len(pool.made) == 1
    nobody = Pool(0)
    nobody.pool.take(SMALL)
    nobody.pass_()
    assert not nobody.made
