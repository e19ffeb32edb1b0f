"""What a client gets of a frontend that is killed, by how far the frontend had come: over real sockets."""

import os
import socket
from contextlib import ExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.service.answer_guard import NOTES, AnswerGuard, AnswerLog, Next

ANSWER, EVENT = b"HTTP/1.1 503 sorry", b"data: sorry"
BUFFER = 1 << 16


class Killed:
    """A frontend with connections of its own, which is killed at the end of the block."""

    def __init__(self):
        self.guard = AnswerGuard()
        self.log = AnswerLog(self.guard.link, (ANSWER, EVENT))
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._ours = []

    def connect(self):
        """The client's end, the frontend's end and its log; the guard has it too by then."""
        client = self._stack.enter_context(socket.create_connection(self._listener.getsockname()))
        client.settimeout(10)
        ours, _ = self._listener.accept()
        ours.setblocking(False)
        self._ours.append(ours)
        return client, ours, self.log.open(ours.fileno())

    def kill(self):
        for ours in self._ours:
            ours.close()
        return self.guard.end()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for ours in self._ours:
            ours.close()
        self.guard.close()
        self._stack.close()


def received(client):
    data = b""
    while more := client.recv(BUFFER):
        data += more
    return data


def write(ours, log, data, then):
    log.write(len(data), then)
    ours.send(data)


def test_every_answer_is_ended_as_it_can_be():
    with Killed() as frontend:
        idle, stream, unanswered, whole, again = (frontend.connect() for _ in range(5))
        write(*stream[1:], b"head", Next.EVENT)
        write(*stream[1:], b"event", Next.EVENT)
        unanswered[2].note(Next.ANSWER)
        unanswered[0].send(b"what nobody read does not reset the connection")
        write(*whole[1:], b"half of an answer", Next.NOTHING)
        write(*again[1:], b"stream", Next.EVENT)
        again[2].note(Next.NOTHING)
        again[2].note(Next.ANSWER)  # it was over, and the next request has come
        ended = frontend.kill()
        assert received(stream[0]) == b"headevent" + EVENT
        assert received(unanswered[0]) == ANSWER
        assert received(again[0]) == b"stream" + ANSWER
        assert (received(idle[0]), received(whole[0])) == (b"", b"half of an answer")
        assert (ended.streams, ended.answers, ended.cut) == (1, 2, 0)


def test_what_was_noted_and_not_written_was_not_written():
    with Killed() as frontend:
        client, ours, log = frontend.connect()
        log.note(Next.ANSWER)
        log.write(4, Next.EVENT)
        frontend.kill()
        assert received(client) == ANSWER
    with Killed() as frontend:
        client, ours, log = frontend.connect()
        write(ours, log, b"head", Next.EVENT)
        for _ in range(NOTES - 1):
            log.write(5, Next.EVENT)  # in one turn of the event loop
        frontend.kill()
        assert received(client) == b"head" + EVENT


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.data())
def test_nothing_is_added_in_the_middle_of_a_write(sizes, data):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    taken = data.draw(st.one_of(st.sampled_from(ends), st.integers(0, ends[-1])))
    with Killed() as frontend:
        client, ours, log = frontend.connect()
        log.note(Next.ANSWER)
        for size in sizes:
            log.write(size, Next.EVENT)
        ours.send(b"x" * taken)
        frontend.kill()
        text = received(client)
    assert text[:taken] == b"x" * taken
    endings = dict.fromkeys(ends[-NOTES:], EVENT) | ({0: ANSWER} if len(sizes) < NOTES else {})
    assert text[taken:] == endings.get(taken, b"")


def test_a_client_that_does_not_read_is_cut_off():
    with Killed() as frontend:
        client, ours, log = frontend.connect()
        text = b"x" * BUFFER
        while True:
            log.write(len(text), Next.EVENT)
            if ours.send(text) < len(text):
                break
        assert frontend.kill().cut == 1
        assert set(received(client)) == set(b"x")


def test_what_the_frontend_has_closed_is_closed_and_its_place_is_used_again():
    with Killed() as frontend:
        frontend.guard.look()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            client, ours, log = frontend.connect()
            write(ours, log, b"head", Next.EVENT)
            log.close()
            frontend.guard.look()
            ours.close()
            assert received(client) == b"head"
            client.close()
        assert len(os.listdir("/proc/self/fd")) <= before
        client, _, log = frontend.connect()
        log.note(Next.ANSWER)
        assert frontend.kill().streams == 0
        assert received(client) == ANSWER


def test_a_launcher_that_does_not_look_costs_no_connection():
    with Killed() as frontend, ExitStack() as stack:
        _, ours, first = frontend.connect()
        logs = []
        while (log := frontend.log.open(ours.fileno())) is not None:
            logs.append(log)
        for log in (first, *logs):
            log.close()  # it cannot be told
        assert frontend.log.open(ours.fileno()) is None
        while frontend.log.open(ours.fileno()) is None:
            frontend.guard.look()
        assert frontend.kill().unfinished == 0
        stack.close()
