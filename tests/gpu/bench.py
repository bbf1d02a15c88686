"""What a case has at hand: binaries, folders that vanish with it, daemons and peers that end."""

from __future__ import annotations

import pathlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import checkpoint
from checkpoint import Tensor
from daemon import Daemon
from peer import Peer
from report import Result


class Bench:
    """Everything that a case may use. Leaving it ends and removes all that it made."""

    def __init__(
        self,
        result: Result,
        binaries: pathlib.Path,
        room: pathlib.Path,
        shm: pathlib.Path,
        kept: pathlib.Path,
        device: str = "cuda",
    ) -> None:
        self.result = result
        self.check = result.check
        self.binaries = binaries
        self.room = room
        self.shm = shm
        self.kept = kept
        self.device = device
        self.daemons: list[Daemon] = []
        self.peers: list[Peer] = []
        self.began = time.monotonic()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.kill()
        for daemon in self.daemons:
            daemon.stop(10)
        shutil.rmtree(self.shm, ignore_errors=True)

    def daemon(self, *flags: str) -> Daemon:
        """A daemon that serves."""
        number = len(self.daemons)
        room = self.room / f"d{number}"
        room.mkdir()
        made = Daemon(self.binaries, room, self.shm / f"d{number}", *flags, device=self.device)
        self.daemons.append(made)
        return made

    def peer(self, work: Callable, *args: object, name: str = "") -> Peer:
        """A process that runs `work(line, *args)`."""
        made = Peer(work, *args, name=name)
        self.peers.append(made)
        return made

    def checkpoint(self, tensors: list[Tensor], seed: int, keep: str = "") -> pathlib.Path:
        """A checkpoint; one to `keep` stays for other cases under that name."""
        folder = self.kept if keep else self.shm
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{keep or seed}.safetensors"
        checkpoint.write(path, tensors, seed)
        return path

    def say(self, text: str) -> None:
        """A line on the terminal, with the time since the case began."""
        print(f"    {time.monotonic() - self.began:6.1f} s  {text}", flush=True)


@dataclass(frozen=True)
class Case:
    """A case of a suite: what it runs, and how long it may take."""

    name: str
    work: Callable[[Bench], None]
    limit: float


class Suite:
    """Cases by name, in their order."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}

    def case(self, limit: float = 60) -> Callable:
        """Adds a function as the case of its name."""

        def add(work: Callable[[Bench], None]) -> Callable[[Bench], None]:
            name = work.__name__
            self.cases[name] = Case(name, work, limit)
            return work

        return add
