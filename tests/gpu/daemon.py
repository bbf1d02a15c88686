"""A daemon in directories of its own."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import time

START_LIMIT = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class DaemonError(Exception):
    """The daemon did not do what it was started for."""


class Daemon:
    """`flextensord serve`, from the prebuilt binaries in `binaries`."""

    def __init__(
        self,
        binaries: pathlib.Path,
        room: pathlib.Path,
        shm: pathlib.Path,
        *flags: str,
        device: str = "cuda",
    ) -> None:
        self.binaries = binaries
        self.runtime_dir = room / "run"
        self.log = room / "daemon.log"
        shm.mkdir(parents=True, exist_ok=True)
        command = [str(binaries / "flextensord"), "serve", "--device", device]
        command += ["--runtime-dir", str(self.runtime_dir), "--shm-dir", str(shm)]
        command += ["--drain-grace", "500ms", "--log", "info", *flags]
        if "--on-stop" not in flags:
            # nobody comes to take over what it would keep
            command += ["--on-stop", "remove"]
        self.command = command
        self.again()
        self.serve_within(START_LIMIT)

    def again(self) -> None:
        """Starts it, once more after its end, as a supervisor does."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def serve_within(self, limit: float) -> None:
        """Waits until it says that it serves."""
        deadline = time.monotonic() + limit
        while True:
            if self.process.poll() is not None:
                code = self.process.returncode
                raise DaemonError(f"the daemon ended at its start with {code}:\n{self.tail()}")
            try:
                if self.status()["phase"] == "serving":
                    return
            except DaemonError as error:
                reason = str(error)
                if time.monotonic() > deadline:
                    raise DaemonError(
                        f"the daemon does not serve: {reason}\n{self.tail()}"
                    ) from None
            time.sleep(0.02)

    def status(self) -> dict:
        """What `flextensorctl status` says."""
        return self.ask("status")

    def pinned_bytes(self) -> int:
        """Bytes of all weight sets that are pinned."""
        return sum(each["pinned_bytes"] for each in self.ask("weights")["weight_sets"])

    def ask(self, command: str):
        """What `flextensorctl` says to that."""
        tool = [str(self.binaries / "flextensorctl"), "--runtime-dir", str(self.runtime_dir)]
        answer = subprocess.run(
            [*tool, command, "--json"], capture_output=True, text=True, timeout=30, check=False
        )
        if answer.returncode:
            raise DaemonError(answer.stderr.strip() or f"flextensorctl: exit {answer.returncode}")
        return json.loads(answer.stdout)

    def manager(self, name: str) -> dict | None:
        """What its status says of the manager, if it is there."""
        found = [each for each in self.status()["managers"] if each["name"] == name]
        return found[0] if found else None

    def text(self) -> str:
        """Its log so far."""
        return ESCAPES.sub("", self.log.read_text(errors="replace"))

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.text().splitlines()[-lines:])

    def pinnings(self) -> list[tuple[int, float]]:
        """Bytes and seconds of each registration of a segment, from its log."""
        found = []
        for line in self.text().splitlines():
            fields = dict(re.findall(r"(\w+)=([0-9.eE+-]+)", line))
            if "pinned" in line and "bytes" in fields and "seconds" in fields:
                found.append((int(fields["bytes"]), float(fields["seconds"])))
        return found

    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        import os

        stat = pathlib.Path(f"/proc/{self.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a crash would: no signal that it could answer."""
        self.process.kill()
        self.process.wait()

    def stop(self, limit: float = 30) -> int:
        """Ends it in order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(limit)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode
