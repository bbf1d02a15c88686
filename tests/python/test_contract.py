"""The .proto is the contract: the daemon driven by plain grpcio, the descriptor channel and
the control page by their documented bytes."""

import os
import struct
import time

import grpc
import pytest

from conftest import DescriptorChannel, request_id, safetensors

EMPTY, FULL, IN_USE = 0, 1, 2
SLOTS, WANT, WANT_NONE = 4096, 128, 0xFFFFFFFF


def model():
    """Six layers of two tensors, every byte told apart."""
    tensors = {}
    for layer in range(6):
        for name in ("w", "v"):
            size = 300_000 + 4 * layer
            seed = layer * 2 + (name == "v")
            data = bytes((seed * 37 + at) % 251 for at in range(256)) * (size // 256 + 1)
            tensors[f"layers.{layer}.{name}"] = ("U8", [size], data[:size])
    return tensors


def load(daemon, stubs, channel, path, name):
    answer = channel.offer(path)
    weights = stubs.weights_grpc.WeightsStub(daemon.grpc)
    request = stubs.weights.LoadRequest(
        request_id=request_id(), name=name, files=list(answer.offered.tickets)
    )
    events = list(weights.Load(request, timeout=60))
    assert events[-1].WhichOneof("event") == "loaded"
    return events[-1].loaded


class Manager:
    """A manager opened and registered by plain calls."""

    def __init__(self, daemon, stubs, channel, tensors, budget):
        self.stubs, self.channel = stubs, channel
        self.offload = stubs.offload_grpc.OffloadStub(daemon.grpc)
        self.lease = self.offload.OpenManager(
            stubs.offload.OpenManagerRequest(
                request_id=request_id(), protocol={"lowest": 1, "highest": 1}, client="pytest"
            )
        )
        self.opened = next(self.lease).opened
        self.token = self.opened.token
        layers = {}
        for name in tensors:
            layers.setdefault(name.rsplit(".", 1)[0], []).append(name)
        self.layers = layers
        header = {
            "request_id": request_id(),
            "token": self.token,
            "weight_set": "model",
            "budget_bytes": budget,
        }
        listed = [{"name": name, "tensors": names} for name, names in layers.items()]
        message = stubs.offload.RegisterModelRequest
        self.registered = self.offload.RegisterModel(
            iter([message(header=header), message(layers={"layers": listed})]), timeout=60
        )
        self.memory, self.parts = None, {}
        request = stubs.offload.GetPlanRequest(token=self.token, tickets=True)
        for page in self.offload.GetPlan(request):
            if page.HasField("memory"):
                self.memory = page.memory
            self.parts.update({part.part: part for part in page.parts})
        self.maps = [channel.map(each.ticket) for each in self.memory.allocations]
        self.control = channel.map(self.memory.control_ticket, writable=True)

    def word(self, part):
        low, high = struct.unpack_from("<II", self.control, SLOTS + 8 * part)
        return high, low

    def acquire(self, layer, **more):
        request = self.stubs.offload.AcquireRequest(
            request_id=request_id(), token=self.token, layer=layer, **more
        )
        return self.offload.Acquire(request, timeout=30)

    def release(self, hold, **more):
        request = self.stubs.offload.ReleaseRequest(
            request_id=request_id(), token=self.token, hold=hold, **more
        )
        return self.offload.Release(request, timeout=30)

    def read(self, part):
        begin = part.offset
        return self.maps[part.allocation][begin : begin + part.stored_bytes]


@pytest.fixture
def setting(daemon, stubs, tmp_path):
    tensors = model()
    served = daemon("--cpu-memory", "8MiB")
    channel = DescriptorChannel(served, stubs)
    path = safetensors(tmp_path / "model.safetensors", tensors)
    loaded = load(served, stubs, channel, path, "model")
    assert loaded.set.tensors == len(tensors) and not loaded.attached
    return served, channel, tensors, path


def test_layers_acquired_by_rpc_have_the_bytes_of_the_file(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    assert 0 < manager.registered.streamed_bytes and manager.memory.stream_order
    for layer in list(manager.layers) * 2:
        hold = manager.acquire(layer)
        names = [tensor.name for part in hold.parts for tensor in part.tensors]
        assert sorted(names) == sorted(manager.layers[layer])
        for part in hold.parts:
            assert manager.read(part) == tensors[part.tensors[0].name][2]
            assert manager.word(part.part)[1] == (IN_USE if part.streamed else EMPTY)
        manager.release(hold.hold)
    manager.lease.cancel()


def test_the_control_page_alone_hands_parts_over(setting, stubs):
    """The fast path by its documented bytes: full -> in use -> empty, `want` while waiting."""
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    doorbell, _ = channel.redeem(manager.opened.doorbell_ticket)
    assert manager.control[:8] == b"FTCTRL01"
    for part in list(manager.memory.stream_order) * 3:
        at = SLOTS + 8 * part
        struct.pack_into("<I", manager.control, WANT, part)
        deadline = time.monotonic() + 10
        while manager.word(part)[1] != FULL:
            os.write(doorbell, struct.pack("=Q", 1))
            assert time.monotonic() < deadline
            time.sleep(0.001)
        struct.pack_into("<I", manager.control, at, IN_USE)
        struct.pack_into("<I", manager.control, WANT, WANT_NONE)
        plan = manager.parts[part]
        assert manager.read(plan) == tensors[plan.tensors[0].name][2]
        struct.pack_into("<I", manager.control, at, EMPTY)
    os.close(doorbell)


def test_device_memory_and_segment_cannot_be_mapped_for_writing(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    request = stubs.offload.GetPlanRequest(token=manager.token, tickets=True)
    memory = next(iter(manager.offload.GetPlan(request))).memory
    with pytest.raises(PermissionError):
        channel.map(memory.allocations[0].ticket, writable=True)
    weights = stubs.weights_grpc.WeightsStub(daemon.grpc)
    got = weights.Get(stubs.weights.GetRequest(name="model", segment=True))
    with pytest.raises(PermissionError):
        channel.map(got.segment_ticket, writable=True)


def test_the_segment_holds_each_tensor_at_its_place(setting, stubs):
    daemon, channel, tensors, _ = setting
    weights = stubs.weights_grpc.WeightsStub(daemon.grpc)
    token, seen, segment = "", {}, None
    while True:
        request = stubs.weights.GetRequest(
            name="model", page_size=5, page_token=token, segment=segment is None
        )
        page = weights.Get(request)
        segment = segment or channel.map(page.segment_ticket)
        for tensor, offset in zip(page.tensors, page.storage_segment_offsets, strict=True):
            begin = offset + tensor.storage_offset
            seen[tensor.name] = segment[begin : begin + tensor.bytes]
            assert offset % 256 == 0
        token = page.next_page_token
        if not token:
            break
    assert seen == {name: data for name, (_, _, data) in tensors.items()}


def test_a_ticket_is_spent_by_its_first_use(setting, stubs):
    daemon, channel, _, _ = setting
    weights = stubs.weights_grpc.WeightsStub(daemon.grpc)
    got = weights.Get(stubs.weights.GetRequest(name="model", segment=True))
    channel.map(got.segment_ticket)
    request = stubs.channel.ChannelRequest(redeem={"ticket": got.segment_ticket})
    answer, _ = channel.ask(request)
    assert answer.refused.kind == "NOT_FOUND"


def test_failures_carry_kind_origin_and_retryable(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    with pytest.raises(grpc.RpcError) as refusal:
        manager.acquire("no such layer")
    assert refusal.value.code() == grpc.StatusCode.NOT_FOUND
    details = dict(refusal.value.trailing_metadata())["grpc-status-details-bin"]
    for word in (b"NOT_FOUND", b"flextensord", b"origin", b"client", b"retryable", b"false"):
        assert word in details


def test_a_held_name_is_refused_and_the_holder_named(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    request = stubs.offload.OpenManagerRequest(
        request_id=request_id(),
        name=manager.opened.name,
        protocol={"lowest": 1, "highest": 1},
    )
    with pytest.raises(grpc.RpcError) as refusal:
        next(manager.offload.OpenManager(request))
    assert refusal.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert str(os.getpid()) in refusal.value.details()


def test_a_repeated_acquire_is_one_hold(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    layer = list(manager.layers)[-1]
    request = stubs.offload.AcquireRequest(
        request_id=request_id(), token=manager.token, layer=layer
    )
    first, again = (manager.offload.Acquire(request, timeout=30) for _ in range(2))
    assert first.hold == again.hold
    manager.release(first.hold)
    with pytest.raises(grpc.RpcError) as refusal:
        manager.release(first.hold)
    assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_health_and_reflection_answer_to_stock_clients(setting, stubs):
    daemon = setting[0]
    check = daemon.grpc.unary_unary("/grpc.health.v1.Health/Check")
    for service in (b"", b"flextensor.v1.Offload", b"flextensor.v1.Admin"):
        request = b"\x0a" + bytes([len(service)]) + service if service else b""
        assert check(request) == b"\x08\x01", "SERVING"
    reflect = daemon.grpc.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    )
    answer = next(reflect(iter([b"\x3a\x00"])))
    for service in (b"flextensor.v1.Offload", b"flextensor.v1.Weights", b"flextensor.v1.Admin"):
        assert service in answer


def test_a_client_of_another_version_is_refused_by_version(setting, stubs):
    daemon = setting[0]
    offload = stubs.offload_grpc.OffloadStub(daemon.grpc)
    request = stubs.offload.OpenManagerRequest(
        request_id=request_id(), protocol={"lowest": 7, "highest": 9}
    )
    with pytest.raises(grpc.RpcError) as refusal:
        next(offload.OpenManager(request))
    assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "7 to 9" in refusal.value.details()
    newer = stubs.offload.OpenManagerRequest(
        request_id=request_id(), protocol={"lowest": 1, "highest": 9}
    )
    assert next(offload.OpenManager(newer)).opened.protocol == 1


def test_put_stores_tied_tensors_and_views_once(setting, stubs):
    daemon, channel, _, _ = setting
    weights = stubs.weights_grpc.WeightsStub(daemon.grpc)
    message = stubs.weights.PutRequest
    data = bytes(range(256)) * 4
    declared = [
        {"name": "emb", "dtype": "F32", "shape": [16, 16]},
        {"name": "head", "dtype": "F32", "shape": [16, 16], "alias_of": "emb"},
        {"name": "row", "dtype": "F32", "shape": [16], "alias_of": "emb", "storage_offset": 64},
        {"name": "t", "dtype": "F32", "shape": [16, 16], "stride": [1, 16], "alias_of": "emb"},
    ]
    put = weights.Put(
        iter(
            [
                message(header={"request_id": request_id(), "name": "tied"}),
                message(tensors={"tensors": declared}),
                message(data={"tensor": "emb", "offset": 0, "bytes": data[:1000]}),
                message(data={"tensor": "emb", "offset": 1000, "bytes": data[1000:]}),
            ]
        )
    )
    assert (put.set.tensors, put.set.storages, put.set.logical_bytes) == (4, 1, 1024)
    listed = weights.List(stubs.weights.ListRequest()).sets
    assert [each.name for each in listed] == ["model", "tied"]
    weights.Drop(stubs.weights.DropRequest(request_id=request_id(), name="tied"))
    assert [e.name for e in weights.List(stubs.weights.ListRequest()).sets] == ["model"]


def test_a_put_that_ends_early_leaves_nothing(setting, stubs):
    daemon = setting[0]
    weights = stubs.weights_grpc.WeightsStub(daemon.grpc)
    message = stubs.weights.PutRequest
    before = sorted(daemon.shm.iterdir())
    requests = [
        message(header={"request_id": request_id(), "name": "half"}),
        message(tensors={"tensors": [{"name": "w", "dtype": "U8", "shape": [1000]}]}),
        message(data={"tensor": "w", "offset": 0, "bytes": b"x" * 10}),
    ]
    with pytest.raises(grpc.RpcError):
        weights.Put(iter(requests))
    assert sorted(daemon.shm.iterdir()) == before
    assert [e.name for e in weights.List(stubs.weights.ListRequest()).sets] == ["model"]


def test_status_and_dump_tell_who_holds_what(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    hold = manager.acquire(list(manager.layers)[0])
    admin = stubs.admin_grpc.AdminStub(daemon.grpc)
    status = admin.Status(stubs.admin.StatusRequest())
    (mine,) = status.managers
    assert mine.owner_pid == os.getpid() and mine.phase == "INFERENCE"
    assert mine.rpc_holds == 1 and mine.lease == "owned" and mine.weight_set == "model"
    (device,) = status.devices
    assert device.allocated_bytes == device.resident_bytes + device.ring_bytes
    (kept,) = status.weight_sets
    assert kept.logical_bytes == sum(len(data) for _, _, data in tensors.values())
    assert kept.attached_by == [manager.opened.name]
    kinds = {record.kind for record in admin.Dump(stubs.admin.DumpRequest())}
    assert {"daemon", "device", "weight_set", "tensors", "manager", "layers", "parts"} <= kinds
    manager.release(hold.hold)


def open_manager(daemon, stubs, **more):
    offload = stubs.offload_grpc.OffloadStub(daemon.grpc)
    request = stubs.offload.OpenManagerRequest(
        request_id=request_id(), protocol={"lowest": 1, "highest": 1}, **more
    )
    lease = offload.OpenManager(request)
    return lease, next(lease).opened


def test_a_lost_stream_is_resumed_by_its_token_and_else_fenced(daemon, stubs):
    served = daemon("--resume-grace", "1s")
    admin = stubs.admin_grpc.AdminStub(served.grpc)
    managers = lambda: list(admin.Status(stubs.admin.StatusRequest()).managers)
    lease, opened = open_manager(served, stubs, name="mine")
    lease.cancel()
    deadline = time.monotonic() + 10
    while managers()[0].lease != "detached":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease, resumed = open_manager(served, stubs, resume_token=opened.token)
    assert (resumed.name, resumed.lease_epoch) == ("mine", opened.lease_epoch)
    assert managers()[0].lease == "owned"
    time.sleep(1.5)
    assert len(managers()) == 1, "the grace time of the lost stream ends nothing"
    lease.cancel()
    while managers():
        assert time.monotonic() < deadline + 20
        time.sleep(0.01)
    with pytest.raises(grpc.RpcError) as refusal:
        open_manager(served, stubs, resume_token=opened.token)
    assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_a_second_stream_of_a_lease_ends_the_first(daemon, stubs):
    served = daemon()
    first, opened = open_manager(served, stubs)
    second, again = open_manager(served, stubs, resume_token=opened.token)
    ended = next(event for event in first if event.WhichOneof("event") == "ended")
    assert ended.ended.reason == stubs.offload.LeaseEnded.RESUMED_ELSEWHERE
    assert again.token == opened.token
    second.cancel()


def test_an_acquire_whose_caller_gave_up_can_be_undone_by_its_id(setting, stubs):
    daemon, channel, tensors, _ = setting
    manager = Manager(daemon, stubs, channel, tensors, 2_000_000)
    admin = stubs.admin_grpc.AdminStub(daemon.grpc)
    for turn in range(200):
        request = stubs.offload.AcquireRequest(
            request_id=request_id(), token=manager.token, layer=f"layers.{turn % 6}"
        )
        call = manager.offload.Acquire.future(request)
        if turn % 3:
            time.sleep(0.001 * (turn % 3))
        call.cancel()
        try:
            # it may have been answered before it was cancelled: nobody else can know
            manager.release(0, acquire_request_id=request.request_id)
        except grpc.RpcError as refusal:
            assert "hold" in refusal.details()
    deadline = time.monotonic() + 10
    while True:
        (mine,) = admin.Status(stubs.admin.StatusRequest()).managers
        idle = mine.rpc_holds == 0 and mine.parts_in_use == 0
        if idle and not mine.HasField("waits_for_part"):
            break
        assert time.monotonic() < deadline, (mine.rpc_holds, mine.parts_in_use, mine.waits_for_part)
        time.sleep(0.05)
