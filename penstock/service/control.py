"""Where the launcher of a deployment is told something while it runs: a socket in its folder, its user's alone.

Lines of JSON: one to ask, then any number to answer, of which the last has "over".
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SOCKET = "control"
MOST = 1 << 22  # bytes of a question
Question = Mapping[str, Any]


class Client:
    """Who asks. It may have gone, which changes nothing."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._read = b""
        self.gone = False

    def question(self) -> Question | None:
        """Once it has come as a whole."""
        try:
            while b"\n" not in self._read:
                piece = self._connection.recv(1 << 16)
                if not piece or len(self._read) > MOST:
                    self.close()
                    return None
                self._read += piece
            asked = json.loads(self._read.partition(b"\n")[0])
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            self.close()
            return None
        return asked if isinstance(asked, dict) else {}

    def tell(self, **answer: Any) -> None:
        if not self.gone:
            try:
                self._connection.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:  # it has gone, or does not read
                self.close()

    def close(self) -> None:
        self.gone = True
        self._connection.close()


class ControlSocket:
    """The launcher's end. Nothing waits."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen()
        self._listener.setblocking(False)
        self._silent: list[Client] = []  # those that have not asked yet

    def questions(self) -> Iterator[tuple[Client, Question]]:
        """What has been asked since the last time."""
        with contextlib.suppress(OSError):  # none is there, or too many files are open
            while True:
                self._silent.append(Client(self._listener.accept()[0]))
        for client in list(self._silent):
            question = client.question()
            if question is not None or client.gone:
                self._silent.remove(client)
            if question is not None:
                yield client, question

    def close(self) -> None:
        for client in self._silent:
            client.close()
        self._listener.close()


def ask(folder: Path, question: Question) -> Iterator[dict[str, Any]]:
    """The answers of the launcher with this folder, as they come. Raises OSError where none listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / SOCKET))
        connection.sendall(json.dumps(question).encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                yield json.loads(line)
