"""Who waits for a place, and how many ask."""

import asyncio

from penstock.service.waiting import ASKERS, WaitingRoom


class Room:
    """With a switch that says whether there are places."""

    def __init__(self, answers=True):
        self.asked, self.placed, self.open, self.answers = [], [], False, answers
        self.room = WaitingRoom(self.ask)

    def ask(self, name):
        self.asked.append(name)
        if self.answers:
            self.answer(name)

    def answer(self, name):
        if self.open:
            self.placed.append(name)
            self.room.leave(name)
            self.room.hurry()
        else:
            self.room.enter(name)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def test_a_few_ask_for_all_and_all_follow_the_first_in_order():
    async def scenario():
        room, names = Room(), [f"r{i}" for i in range(1000)]
        for name in names:
            room.room.enter(name)
        for rounds in (1, 2, 3):
            await until(lambda n=rounds: len(room.asked) >= n * ASKERS)
            assert len(room.asked) == rounds * ASKERS
        room.open = True
        room.room.hurry()
        await until(lambda: not room.room)
        assert len(room.placed) == len(names)
        assert room.placed[: 1000 - 3 * ASKERS] == names[3 * ASKERS :]

    run(scenario)


def test_no_more_ask_while_questions_are_under_way():
    async def scenario():
        room = Room(answers=False)
        for i in range(20):
            room.room.enter(str(i))
        for _ in range(5):
            room.room.hurry()
            room.room.hurry()
            await asyncio.sleep(0.001)
        assert room.asked == [str(i) for i in range(ASKERS)]
        assert len(room.room) == 20
        room.room.leave("0")  # cancelled
        room.room.leave("19")
        room.room.hurry()
        await until(lambda: len(room.asked) == ASKERS + 1)
        assert len(room.room) == 18

    run(scenario)


def test_an_empty_room_has_no_timer():
    async def scenario():
        room = Room()
        room.room.hurry()
        room.room.enter("a")
        room.room.leave("a")
        await until(lambda: room.room._timer is None)
        assert room.asked == []

    run(scenario)
