"""What a hostile or careless client tried once, and must never achieve again."""

import fcntl
import os
import pathlib
import socket
import subprocess
import time

import grpc
import pytest

from conftest import TARGET, DescriptorChannel, request_id
from test_contract import Manager, open_manager, setting  # noqa: F401 (a fixture)

F_GET_SEALS, SHRINK_AND_GROW = 1034, 0b110


def test_no_descriptor_that_is_given_away_can_be_truncated(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    request = stubs.offload.GetPlanRequest(token=manager.token, tickets=True)
    memory = next(iter(manager.offload.GetPlan(request))).memory
    tickets = [each.ticket for each in memory.allocations]
    tickets += [memory.control_ticket, manager.opened.notice_ticket]
    for ticket in tickets:
        descriptor, size = channel.redeem(ticket)
        seals = fcntl.fcntl(descriptor, F_GET_SEALS)
        assert seals & SHRINK_AND_GROW == SHRINK_AND_GROW
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{descriptor}", 0)
        assert os.fstat(descriptor).st_size >= size
        os.close(descriptor)
    # streaming goes on, and the daemon with it
    for layer in manager.layers:
        manager.release(manager.acquire(layer).hold)


def test_a_repeated_acquire_of_a_spent_hold_is_refused(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    request = stubs.offload.AcquireRequest(
        request_id=request_id(), token=manager.token, layer="layers.4"
    )
    manager.release(manager.offload.Acquire(request).hold)
    with pytest.raises(grpc.RpcError) as refusal:
        manager.offload.Acquire(request)
    assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "given back" in refusal.value.details()


def test_a_drain_takes_no_new_weights_and_the_earliest_deadline_counts(setting, stubs):
    daemon, _, _, _ = setting
    lease, _ = open_manager(daemon, stubs)
    admin = stubs.admin_grpc.AdminStub(daemon.grpc)
    drain = lambda ms: admin.Drain(
        stubs.admin.DrainRequest(request_id=request_id(), deadline_ms=ms)
    )
    for deadline in (3_600_000, 2**64 - 1):
        assert drain(deadline).managers == 1
    weights = stubs.weights_grpc.WeightsStub(daemon.grpc)
    message = stubs.weights.PutRequest
    with pytest.raises(grpc.RpcError) as refusal:
        weights.Put(iter([message(header={"request_id": request_id(), "name": "new"})]))
    assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
    drain(300)
    assert daemon.process.wait(timeout=10) == 0
    lease.cancel()


def test_offered_files_end_with_their_connection_and_lock_nobody_out(setting, stubs):
    daemon, _, _, path = setting
    descriptors = [os.open(path, os.O_RDONLY) for _ in range(64)]
    for _ in range(20):
        flood = DescriptorChannel(daemon, stubs)
        names = [path.name] * 64
        request = stubs.channel.ChannelRequest(offer={"file_names": names})
        answer, _ = flood.ask(request, descriptors)
        assert len(answer.offered.tickets) == 64
        flood.socket.close()
    for descriptor in descriptors:
        os.close(descriptor)
    before = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    assert before < 200, "descriptors of gone connections"
    open_manager(daemon, stubs)[0].cancel()


def test_the_channel_asks_for_hello_and_answers_what_is_too_large(setting, stubs):
    daemon, _, _, _ = setting
    raw = daemon.channel()
    redeem = stubs.channel.ChannelRequest(redeem={"ticket": b"x" * 16})
    raw.send(redeem.SerializeToString())
    answer = stubs.channel.ChannelAnswer.FromString(raw.recv(65536))
    assert answer.refused.kind == "FAILED_PRECONDITION"
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    raw.send(b"x" * 100_000)
    answer = stubs.channel.ChannelAnswer.FromString(raw.recv(65536))
    assert answer.refused.kind == "INVALID_ARGUMENT"
    raw.send(stubs.channel.ChannelRequest(hello={"protocol": 1}).SerializeToString())
    answer = stubs.channel.ChannelAnswer.FromString(raw.recv(65536))
    assert answer.welcome.protocol == 1
    raw.close()


def test_counters_do_not_wrap_and_names_carry_no_control_characters(setting, stubs):
    daemon, _, _, _ = setting
    lease, opened = open_manager(daemon, stubs)
    offload = stubs.offload_grpc.OffloadStub(daemon.grpc)
    report = lambda: offload.ReportPass(
        stubs.offload.ReportPassRequest(
            request_id=request_id(), token=opened.token, passes=2**64 - 1
        )
    )
    assert [report().passes for _ in range(2)] == [2**64 - 1] * 2
    with pytest.raises(grpc.RpcError) as refusal:
        open_manager(daemon, stubs, client="\x1b[31mred")
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    lease.cancel()


def test_a_thousand_idle_connections_of_a_user_leave_room_for_others(daemon, stubs):
    served = daemon()
    idle = []
    try:
        for _ in range(1100):
            connection = served.channel()
            idle.append(connection)
        # those over the limit are closed at once
        deadline = time.monotonic() + 10
        while idle[-1].recv(1, socket.MSG_PEEK) != b"":
            assert time.monotonic() < deadline
    finally:
        for connection in idle:
            connection.close()
    lease, _ = open_manager(served, stubs)
    lease.cancel()


def ctl(daemon, *arguments):
    """An operator's tool: another process than this one."""
    command = [TARGET / "flextensorctl", "--runtime-dir", daemon.directory / "run", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, timeout=30)


def is_closed(connection):
    connection.setblocking(False)
    try:
        # an end may come after the daemon's own first frame
        while connection.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def until(happens, seconds=20):
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_silent_grpc_connections_of_a_process_are_limited_and_end(daemon, stubs):
    served = daemon("--log", "warn")
    silent = [socket.socket(socket.AF_UNIX) for _ in range(80)]
    for connection in silent:
        connection.connect(str(served.sockets / "flextensord.sock"))
    # this process has one more, for gRPC: those over 64 are closed at once
    until(lambda: sum(map(is_closed, silent)) == 17)
    assert ctl(served, "status").returncode == 0
    # the others have ten seconds to speak
    until(lambda: all(map(is_closed, silent)))
    for connection in silent:
        connection.close()
    lease, _ = open_manager(served, stubs)
    lease.cancel()


def test_a_daemon_out_of_descriptors_says_so_rests_and_recovers(daemon, stubs, tmp_path):
    served = daemon("--log", "warn", descriptors=128)
    path = tmp_path / "f"
    path.touch()
    descriptors = [os.open(path, os.O_RDONLY) for _ in range(64)]
    channels, kinds = [], []
    request = stubs.channel.ChannelRequest(offer={"file_names": [path.name] * 64})
    channels.append(DescriptorChannel(served, stubs))
    for _ in range(2):
        answer, _ = channels[0].ask(request, descriptors)
        kinds.append(answer.refused.kind or "offered")
        assert "packet" in answer.refused.field or answer.offered.tickets
    assert kinds == ["offered", "TOO_MANY"]
    # file by file until there is no descriptor left, then wait at the door
    one = stubs.channel.ChannelRequest(offer={"file_names": [path.name]})
    answer = None
    while answer is None or answer.WhichOneof("answer") == "offered":
        answer, _ = channels[0].ask(one, descriptors[:1])
    assert answer.refused.kind == "TOO_MANY"
    waiting = subprocess.Popen(
        [str(TARGET / "flextensorctl"), "--runtime-dir", str(served.directory / "run"), "status"],
        stdout=subprocess.DEVNULL,
    )

    def cpu_seconds():
        text = (pathlib.Path("/proc") / str(served.process.pid) / "stat").read_text()
        fields = text[text.rindex(")") :].split()
        return (int(fields[12]) + int(fields[13])) / os.sysconf("SC_CLK_TCK")

    before = cpu_seconds()
    time.sleep(2)
    assert cpu_seconds() - before < 1, "it tries again and again"
    channels[0].socket.close()
    assert waiting.wait(timeout=20) == 0
    for descriptor in descriptors:
        os.close(descriptor)
    lease, _ = open_manager(served, stubs)
    lease.cancel()
