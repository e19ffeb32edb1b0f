"""`penstock chat`, through pipes and at a terminal."""

import argparse
import io
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from penstock.cli import chat
from penstock.core.errors import ConfigError, PenstockError, Unavailable

PROGRAM = """
import argparse, signal, sys
from penstock.cli import chat
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
parser = argparse.ArgumentParser()
chat.add_parser(parser.add_subparsers())
args = parser.parse_args(["chat", *sys.argv[1:]])
sys.exit(args.run(args))
"""


def run(monkeypatch, lines, *words):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    parser = argparse.ArgumentParser()
    chat.add_parser(parser.add_subparsers())
    args = parser.parse_args(["chat", *words])
    return args.run(args)


def test_piped_lines_are_one_conversation(server, monkeypatch, capsys):
    code = run(
        monkeypatch, ["hello", "", "again"], "--base-url", server.url, "--system", "be brief", "--max-tokens", "2"
    )
    assert code == 0
    assert capsys.readouterr().out == "word word \nword word \n"
    first, second = server.bodies
    assert first["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    answer = {"role": "assistant", "content": "word word "}
    assert second["messages"] == [*first["messages"], answer, {"role": "user", "content": "again"}]
    assert second.items() >= {"model": "fake", "max_tokens": 2, "stream": True}.items()
    assert "temperature" not in second


def test_commands(server, monkeypatch, capsys):
    lines = [
        "one",
        "/reset",
        "two",
        "/system speak Latin",
        "three",
        "/system",
        "/help",
        "/what",
        "four",
        "/quit",
        "five",
    ]
    assert run(monkeypatch, lines, "--base-url", server.url + "/v1/", "--temperature", "0") == 0
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [["one"], ["two"], ["speak Latin", "three"], ["four"]]
    assert server.bodies[0]["temperature"] == 0
    errors = capsys.readouterr().err
    assert "/what is no command" in errors
    assert errors.count("/reset") == 2


def test_no_server_is_one_line(server, monkeypatch, capsys):
    server.stop()
    assert run(monkeypatch, ["x"], "--base-url", server.url) == 1
    error = capsys.readouterr().err
    assert f"no server at {server.url}" in error
    assert f"penstock serve MODEL --port {server.port}" in error
    assert error.count("\n") == 1


def test_a_failed_answer_fails_the_pipe(server, monkeypatch, capsys):
    server.fail_every = 2
    assert run(monkeypatch, ["one", "two", "three"], "--base-url", server.url) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("word word")
    assert "the server answered 500: told to fail" in captured.err
    assert len(server.bodies) == 2


@pytest.mark.parametrize(("setting", "error"), [("break_after", Unavailable), ("error_after", PenstockError)])
def test_an_answer_that_breaks_off_is_an_error_and_its_words_are_kept(server, setting, error):
    setattr(server, setting, 2)
    conversation = chat.Chat(chat.Server(chat.parse_url(server.url), None), "fake", None, {})
    with pytest.raises(error):
        list(conversation.ask("hello"))
    assert [turn["content"] for turn in conversation.turns] == ["hello", "word word "]


def test_a_refused_prompt_is_not_remembered(server):
    server.status = 413
    conversation = chat.Chat(chat.Server(chat.parse_url(server.url), None), "fake", None, {})
    with pytest.raises(PenstockError, match="413"):
        list(conversation.ask("hello"))
    assert conversation.turns == []


def test_stopping_an_answer_closes_the_connection_and_keeps_what_was_said(server):
    server.token_delay = 0.01
    conversation = chat.Chat(chat.Server(chat.parse_url(server.url), "key"), "fake", None, {"max_tokens": 10**6})
    pieces = conversation.ask("hello")
    assert next(pieces).content == "word "
    pieces.close()
    assert server.cancelled.wait(10)
    assert [turn["content"] for turn in conversation.turns] == ["hello", "word "]
    assert server.headers["Authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "localhost:8000"), "--url: localhost:8000"),
        (("--base-url", "http://x:y"), "--url: http://x:y"),
        (("--temperature", "3"), "--temperature: '3'"),
        (("--max-tokens", "0"), "--max-tokens: '0'"),
    ],
)
def test_bad_flags_are_named(monkeypatch, words, message):
    with pytest.raises(ConfigError, match=message):
        run(monkeypatch, [], *words)


def test_an_unknown_model_is_named(server, monkeypatch):
    with pytest.raises(ConfigError, match="--model: other, this server has fake"):
        run(monkeypatch, [], "--base-url", server.url, "--model", "other")


class Terminal:
    """The program at a pseudo-terminal."""

    def __init__(self, *words, kind="dumb"):
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", PROGRAM, *words]
        environment = os.environ | {"TERM": kind, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def interrupt(self):
        self._process.send_signal(signal.SIGINT)

    def read_until(self, text, seconds=20.0):
        """Reads on until `text` comes after what was read up to now."""
        begin, deadline = len(self.text), time.monotonic() + seconds
        os.set_blocking(self._master, False)
        while text not in self.text[begin:]:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self._master, 4096).decode()
            except BlockingIOError:
                time.sleep(0.01)
        return self.text[begin:]

    def end(self):
        code = self._process.wait(20)
        os.close(self._master)
        return code


def test_at_a_terminal_an_interrupt_stops_the_answer_and_not_the_chat(server):
    server.token_delay = 0.01
    terminal = Terminal("--base-url", server.url, "--max-tokens", "1000000")
    terminal.read_until("> ")
    terminal.type("hello\n")
    terminal.read_until("word word")
    terminal.interrupt()
    terminal.read_until("stopped")
    assert server.cancelled.wait(10)
    server.stop_early = 3
    terminal.type("again\n")
    terminal.read_until("3 tokens, first after")
    assert server.bodies[-1]["messages"][1]["role"] == "assistant"
    assert server.bodies[-1]["messages"][1]["content"].startswith("word word")
    terminal.type("/quit\n")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("xterm", "\x1b[200~", "\x1b[201~\r"), ("dumb", "", "\n")], ids=["bracketed", "plain"]
)
def test_pasted_text_is_one_message(server, kind, before, after):
    terminal = Terminal("--base-url", server.url, "--max-tokens", "2", kind=kind)
    terminal.read_until("> ")
    terminal.type(before + "def f():\n    return 1\n\nwhat is that?" + after)
    terminal.read_until("2 tokens, first after")
    terminal.type("/quit\n")
    assert terminal.end() == 0
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "def f():\n    return 1\n\nwhat is that?"}]
