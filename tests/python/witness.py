"""What a daemon shows and keeps, to see that a refusal changed nothing."""

import difflib
import json
import os
import time

import grpc

DETAILS = "grpc-status-details-bin"
# how long nothing changes when the daemon is at rest
REST = 0.1
RESTLESS = {"uptime_ms", "budget_bytes", "shm_free_bytes", "queued_bytes", "engine_asleep"}


def error_info(error):
    """Reason and metadata of the google.rpc.ErrorInfo of a refusal, read by its bytes."""
    packed = dict(error.trailing_metadata() or ()).get(DETAILS)
    assert packed, f"no details: {error}"
    for any_message in fields(packed, 3):
        (kind,) = fields(any_message, 1)
        if kind != b"type.googleapis.com/google.rpc.ErrorInfo":
            continue
        (info,) = fields(any_message, 2)
        (reason,) = fields(info, 1)
        pairs = [(fields(each, 1), fields(each, 2)) for each in fields(info, 3)]
        text = lambda parts: parts[0].decode() if parts else ""
        return reason.decode(), {text(key): text(value) for key, value in pairs}
    raise AssertionError(f"no ErrorInfo: {error}")


def fields(message, wanted):
    """The length-delimited fields of that number of a protobuf message."""
    found, at = [], 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 2:
            length = varint()
            if key >> 3 == wanted:
                found.append(bytes(message[at : at + length]))
            at += length
        else:
            assert key & 7 == 0
            varint()
    return found


class Witness:
    """Watches over a daemon; `refuses` is the one way to expect a refusal."""

    def __init__(self, daemon, stubs):
        self.daemon, self.stubs = daemon, stubs
        self.admin = stubs.admin_grpc.AdminStub(daemon.grpc)
        self.weights = stubs.weights_grpc.WeightsStub(daemon.grpc)
        self.health = daemon.grpc.unary_unary("/grpc.health.v1.Health/Check")

    def look(self):
        status = self.admin.Status(self.stubs.admin.StatusRequest())
        status.uptime_ms = 0
        for device in status.devices:
            device.queued_bytes, device.engine_asleep = 0, False
        host = status.host
        host.budget_bytes, host.shm_free_bytes = 0, 0
        dump = [
            (record.kind, record.name, still(json.loads(record.json)))
            for record in self.admin.Dump(self.stubs.admin.DumpRequest())
        ]
        return {
            "status": str(status),
            "sets": str(self.weights.List(self.stubs.weights.ListRequest()).sets),
            "dump": dump,
            "shm": sorted((e.name, e.stat().st_size) for e in os.scandir(self.daemon.shm)),
            "state": sorted(
                (path.name, path.read_bytes())
                for path in (self.daemon.sockets / "state").iterdir()
            ),
            "sockets": sorted(path.name for path in self.daemon.sockets.iterdir()),
            "descriptors": len(os.listdir(f"/proc/{self.daemon.process.pid}/fd")),
        }

    def snapshot(self):
        before, still_since = self.look(), time.monotonic()
        for _ in range(500):
            time.sleep(0.01)
            now = self.look()
            if now != before:
                before, still_since = now, time.monotonic()
            elif time.monotonic() > still_since + REST:
                return now
        raise AssertionError("the daemon does not come to rest")

    def unchanged(self, before):
        deadline = time.monotonic() + 5
        while True:
            now = self.look()
            now["descriptors"] = max(now["descriptors"], before["descriptors"])
            if now == before:
                break
            if time.monotonic() > deadline:
                for key, value in before.items():
                    assert now[key] == value, key + difference(value, now[key])
            time.sleep(0.01)
        assert self.daemon.process.poll() is None
        assert self.health(b"") == b"\x08\x01", "SERVING"

    def refuses(self, call, kind, field=None, rule="", before=None):
        """`call` is refused with that kind, naming field, value and rule; nothing changes."""
        before = before or self.snapshot()
        try:
            answer = call()
            if hasattr(answer, "__iter__"):
                answer = list(answer)
        except grpc.RpcError as error:
            reason, details = error_info(error)
            shown = f"{reason}: {error.details()}: {details}"
            assert reason == kind, shown
            assert details["origin"] and details["retryable"] in ("true", "false"), shown
            if field is not None:
                assert field in details["field"] and "value" in details, shown
                assert rule in details["rule"] and details["rule"], shown
        else:
            raise AssertionError(f"not refused: {answer}")
        self.unchanged(before)
        return details


def difference(before, now):
    """What of a long text is another."""
    lines = [str(text).replace(", ", "\n").splitlines() for text in (before, now)]
    return "".join(
        f"\n{line}" for line in difflib.ndiff(*lines) if line[:1] in "+-"
    )


def still(value):
    """A dump's document without the figures that change by themselves."""
    if isinstance(value, dict):
        return {key: still(each) for key, each in value.items() if key not in RESTLESS}
    return [still(each) for each in value] if isinstance(value, list) else value
