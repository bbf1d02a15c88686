"""Processes beside the one of the case: clients that compute, are killed, are stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any


class PeerError(Exception):
    """A peer failed, or said nothing in its time."""


class Line:
    """A peer's own end of the line to the case."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def put(self, message: object) -> None:
        self.connection.send(("said", message))

    def get(self) -> Any:
        return self.connection.recv()

    def asked(self) -> bool:
        """Whether the case has said something."""
        return self.connection.poll()


def _run(connection: Connection, work, args) -> None:
    line = Line(connection)
    try:
        connection.send(("done", work(line, *args)))
    except BaseException as error:  # whatever it is, the case must hear of it
        text = "".join(traceback.format_exception(error))
        connection.send(("failed", f"{type(error).__name__}: {error}\n{text}"))
    finally:
        connection.close()
        # a context that has faulted may not let the interpreter end in order
        os._exit(0)


class Peer:
    """A process that runs `work(line, *args)`."""

    def __init__(self, work, *args: object, name: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name or work.__name__
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, work, args), name=self.name)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def put(self, message: object) -> None:
        self.connection.send(message)

    def get(self, limit: float) -> Any:
        """What it says next, or what it returned."""
        if not self.connection.poll(limit):
            raise PeerError(f"{self.name} said nothing for {limit} s")
        try:
            kind, message = self.connection.recv()
        except EOFError:
            self.process.join(5)
            raise PeerError(f"{self.name} ended with {self.process.exitcode}") from None
        if kind == "failed":
            raise PeerError(f"{self.name} failed: {message}")
        return message

    def silent(self) -> bool:
        """Whether it has said nothing that was not taken yet."""
        return not self.connection.poll(0)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kills it and waits until it is gone."""
        self.process.kill()
        self.process.join()
