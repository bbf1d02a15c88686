"""Requests that no client of ours would send, by raw protobuf: each is refused by its rule,
changes nothing, and the daemon serves on."""

import os
import random
import socket
import time

import grpc
import pytest

from conftest import DescriptorChannel, request_id, safetensors
from test_contract import FULL, Manager, load, model
from witness import Witness, error_info

HUGE = 2**64 - 1
PUT, REGISTER = "/flextensor.v1.Weights/Put", "/flextensor.v1.Offload/RegisterModel"


@pytest.fixture
def scene(daemon, stubs, tmp_path):
    tensors = model()
    served = daemon("--cpu-memory", "8MiB", "--log", "warn", "--resume-grace", "100ms")
    channel = DescriptorChannel(served, stubs)
    load(served, stubs, channel, safetensors(tmp_path / "model.safetensors", tensors), "model")
    manager = Manager(served, stubs, channel, tensors, 2_000_000)
    witness = Witness(served, stubs)
    # the engine fills the ring before it rests
    first = manager.memory.stream_order[0]
    deadline = time.monotonic() + 20
    while manager.word(first)[1] != FULL:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield served, channel, manager, witness
    manager.lease.cancel()


def requests(stubs, parts):
    """A stream of PutRequests out of dicts."""
    return iter([stubs.weights.PutRequest(**part) for part in parts])


def header(**more):
    return {"header": {"request_id": request_id(), "name": "bad", **more}}


def declared(**more):
    return {"tensors": {"tensors": [{"name": "w", "dtype": "U8", "shape": [4096], **more}]}}


def data(offset, count, tensor="w"):
    return {"data": {"tensor": tensor, "offset": offset, "bytes": b"x" * count}}


def test_unknown_layers_tokens_holds_and_parts_are_refused_by_name(scene, stubs):
    _, _, manager, witness = scene
    before = witness.snapshot()
    message, token = stubs.offload, manager.token
    refuses = lambda *args: witness.refuses(*args, before=before)
    refuses(lambda: manager.acquire("nosuch"), "NOT_FOUND", "layer", "layer of the manager")
    refuses(lambda: manager.acquire(""), "NOT_FOUND", "layer")
    refuses(lambda: manager.acquire("x" * 100_000), "NOT_FOUND", "layer")
    refuses(lambda: manager.release(7), "UNKNOWN_HOLD", "hold", "not given back")
    refuses(lambda: manager.release(HUGE), "UNKNOWN_HOLD", "hold")
    refuses(lambda: manager.release(0), "INVALID_ARGUMENT", "hold", "one of the two")
    refuses(
        lambda: manager.release(7, acquire_request_id=request_id()),
        "INVALID_ARGUMENT", "hold", "one of the two",
    )
    for wrong in ("short", "x" * 129):
        refuses(
            lambda: manager.release(0, acquire_request_id=wrong),
            "INVALID_ARGUMENT", "acquire_request_id", "16 to 128",
        )
    layer = next(iter(manager.layers))
    refuses(
        lambda: manager.acquire(layer, except_parts=[4_000_000_000]),
        "INVALID_ARGUMENT", "except_parts", "parts of layer",
    )
    refuses(
        lambda: manager.acquire(layer, timeout_ms=600_001),
        "INVALID_ARGUMENT", "timeout_ms", "600000",
    )
    hold = manager.acquire(layer)
    held = witness.snapshot()
    witness.refuses(
        lambda: manager.release(hold.hold, keep_parts=[99]),
        "INVALID_ARGUMENT", "keep_parts", "parts of hold", before=held,
    )
    manager.release(hold.hold)
    # what was given back is filled again
    before = witness.snapshot()
    layers = iter(
        [
            message.RegisterModelRequest(
                header={"request_id": request_id(), "weight_set": "model", "budget_bytes": 9}
            ),
            message.RegisterModelRequest(layers={"layers": [{"name": "l"}]}),
        ]
    )
    refuses(lambda: manager.offload.RegisterModel(layers), "LEASE_LOST", "token")
    for wrong in (b"", b"\0" * 32, token[:-1], token + b"\0", os.urandom(32), b"x" * 100_000):
        id_and_token = {"request_id": request_id(), "token": wrong}
        for call in (
            lambda: manager.offload.Acquire(message.AcquireRequest(layer=layer, **id_and_token)),
            lambda: manager.offload.Release(message.ReleaseRequest(hold=1, **id_and_token)),
            lambda: manager.offload.ReportPass(message.ReportPassRequest(passes=1, **id_and_token)),
            lambda: manager.offload.GetPlan(message.GetPlanRequest(token=wrong, tickets=True)),
            lambda: manager.offload.CloseManager(message.CloseManagerRequest(**id_and_token)),
        ):
            details = refuses(call, "LEASE_LOST", "token", "token of a manager")
            assert token.hex() not in str(details)
    open_request = message.OpenManagerRequest(
        request_id=request_id(), protocol={"lowest": 1, "highest": 1}, resume_token=b"x" * 32
    )
    refuses(lambda: manager.offload.OpenManager(open_request), "LEASE_LOST", "token")
    assert manager.acquire(layer).parts


def test_fields_of_all_calls_are_held_to_their_rules(scene, stubs):
    _, _, manager, witness = scene
    before = witness.snapshot()
    offload, weights, admin = manager.offload, witness.weights, witness.admin

    def open_manager(**more):
        fields = {"request_id": request_id(), "protocol": {"lowest": 1, "highest": 1}}
        return lambda: offload.OpenManager(stubs.offload.OpenManagerRequest(**{**fields, **more}))

    def terminate(name):
        fields = {"request_id": request_id(), "name": name}
        return lambda: admin.TerminateManager(stubs.admin.TerminateManagerRequest(**fields))

    def dump(name):
        return lambda: admin.Dump(stubs.admin.DumpRequest(manager=name))

    for call, field, rule in (
        (open_manager(client="x" * 129), "client", "128 bytes"),
        (open_manager(link_weight=1001), "link_weight", "1000"),
        (open_manager(request_id=""), "request_id", "16"),
        (open_manager(request_id="x" * 129), "request_id", "128"),
        (open_manager(name="a/b"), "name", "'/'"),
        (open_manager(name="a\0b"), "name", "contains"),
        (open_manager(name=".."), "name", "starts with"),
        (open_manager(name="x" * 129), "name", "128"),
        (
            lambda: weights.Load(stubs.weights.LoadRequest(request_id=request_id(), name="x")),
            "files", ".safetensors",
        ),
        (
            lambda: weights.Load(
                stubs.weights.LoadRequest(request_id=request_id(), content_id="id")
            ),
            "content_id", "needs a name",
        ),
        (
            lambda: weights.Load(
                stubs.weights.LoadRequest(request_id=request_id(), name="x", content_id="a\n")
            ),
            "content_id", "control",
        ),
        (
            lambda: weights.Get(stubs.weights.GetRequest(name="model", page_size=2001)),
            "page_size", "2000",
        ),
        (
            lambda: weights.Get(stubs.weights.GetRequest(name="model", page_token="x:1")),
            "page_token", "token",
        ),
        (lambda: weights.List(stubs.weights.ListRequest(page_size=1001)), "page_size", "1000"),
        (lambda: weights.List(stubs.weights.ListRequest(page_token="x")), "page_token", "token"),
        (lambda: weights.Drop(stubs.weights.DropRequest(name="model")), "request_id", "16"),
        (
            lambda: admin.TerminateManager(stubs.admin.TerminateManagerRequest(name="default")),
            "request_id", "16",
        ),
        (lambda: admin.Drain(stubs.admin.DrainRequest()), "request_id", "16"),
        (terminate(""), "name", "empty"),
        (terminate("a/b"), "name", "'/'"),
        (terminate("a\0b"), "name", "contains"),
        (terminate(".."), "name", "starts with"),
        (terminate("x" * 129), "name", "128"),
        (dump("a/b"), "manager", "'/'"),
        (dump("a\0b"), "manager", "contains"),
        (dump(".."), "manager", "starts with"),
        (dump("x" * 129), "manager", "128"),
    ):
        if field == "content_id":
            # the rule is found before the files are
            witness.refuses(call, "INVALID_ARGUMENT", field, rule, before=before)
            continue
        witness.refuses(call, "INVALID_ARGUMENT", field, rule, before=before)
    unknown = stubs.weights.LoadRequest(request_id=request_id(), name="x", files=[b"x" * 16])
    witness.refuses(lambda: weights.Load(unknown), "NOT_FOUND", "files", before=before)
    witness.refuses(dump("nobody"), "NOT_FOUND", "manager", before=before)
    other = open_manager(protocol={"lowest": 7, "highest": 9})
    details = witness.refuses(other, "PROTOCOL_VERSION", "protocol", "1", before=before)
    assert details["value"] == "7 to 9"
    details = witness.refuses(open_manager(name="default"), "MANAGER_TAKEN", "name", before=before)
    assert details["value"] == "default"


def test_a_second_registration_names_the_manager_and_the_rule(scene, stubs):
    _, _, manager, witness = scene
    register = stubs.offload.RegisterModelRequest
    fields = {"token": manager.token, "weight_set": "model", "budget_bytes": 1 << 20}
    stream = lambda: iter(
        [
            register(header={"request_id": request_id(), **fields}),
            register(layers={"layers": [{"name": "l", "tensors": ["layers.0.w"]}]}),
        ]
    )
    call = lambda: manager.offload.RegisterModel(stream())
    details = witness.refuses(call, "FAILED_PRECONDITION", "token", "each registers one")
    assert "default" in details["value"] and details["remedy"]


def test_streams_in_the_wrong_order_or_beyond_the_object_leave_nothing(scene, stubs):
    """Case 12 over a put's offsets: (offset, bytes) against a storage of 4096."""
    _, _, manager, witness = scene
    before = witness.snapshot()
    cases = [
        ([declared()], "part", "header"),
        ([data(0, 1)], "part", "header"),
        ([], "part", "ended without a message"),
        ([{}], "part", ""),
        ([header(), header()], "header", "first message"),
        ([header(), declared(), header()], "header", "first message"),
        ([header(), declared(), data(0, 1), declared()], "tensors", "before the first data"),
        ([header(), data(0, 1)], "tensors", "no tensors"),
        ([header()], "tensors", "no tensors"),
        ([header(), declared(), data(0, 4097)], "offset", "passes the end"),
        ([header(), declared(), data(1, 1)], "offset", "next byte"),
        ([header(), declared(), data(4096, 1)], "offset", "next byte"),
        ([header(), declared(), data(HUGE, 2)], "offset", "next byte"),
        ([header(), declared(), data(0, 4096), data(4096, 1)], "offset", "passes the end"),
        ([header(), declared(), data(0, 10), data(0, 10)], "offset", "next byte"),
        ([header(), declared(), data(0, 1, "v")], "data.tensor", "owns its storage"),
        ([header(), declared(shape=[2**33, 2**33])], "shape", "overflows"),
        ([header(), declared(shape=[1] * 65)], "shape", "65 dimensions"),
        ([header(), declared(storage_bytes=1)], "storage_bytes", "need 4096"),
        ([header(), declared(storage_offset=1)], "storage_offset", "only with alias_of"),
        ([header(), declared(alias_of="w", storage_bytes=1)], "alias_of", "owns"),
        ([header(), declared(stride=[-1])], "stride", "negative"),
        ([header(), declared(), declared()], "name", "twice"),
    ]
    for parts, field, rule in cases:
        call = lambda parts=parts: witness.weights.Put(requests(stubs, parts))
        witness.refuses(call, "INVALID_ARGUMENT", field, rule, before=before)
    short = [header(), declared(), data(0, 4095)]
    witness.refuses(
        lambda: witness.weights.Put(requests(stubs, short)), "ABORTED", before=before
    )
    register = stubs.offload.RegisterModelRequest
    first = lambda: register(
        header={
            "request_id": request_id(), "token": manager.token, "weight_set": "model",
            "budget_bytes": 1 << 20,
        }
    )
    layers = register(layers={"layers": [{"name": "l", "tensors": ["layers.0.w"]}]})
    long = register(layers={"layers": [{"name": "l", "tensors": ["x" * 513]}]})
    no_budget = register(header={"request_id": request_id(), "token": manager.token})
    for messages, field, rule in (
        ([], "part", "ended without a message"),
        ([layers], "part", "header"),
        ([register()], "part", "header"),
        ([first()], "layers", "at least one"),
        ([first(), first()], "part", "once"),
        ([first(), layers, first()], "part", "once"),
        ([first(), register()], "part", "once"),
        ([first(), long], "layers.tensors", "512"),
        ([no_budget, layers], "budget", "memory_fraction"),
    ):
        call = lambda messages=messages: manager.offload.RegisterModel(iter(messages))
        witness.refuses(call, "INVALID_ARGUMENT", field, rule, before=before)


def test_messages_over_4_mib_are_refused_with_the_limit(scene, stubs):
    _, _, manager, witness = scene
    before = witness.snapshot()
    big = "x" * (4 << 20)
    register = stubs.offload.RegisterModelRequest
    layers = register(layers={"layers": [{"name": "l", "tensors": [big]}]})
    calls = (
        lambda: witness.admin.Dump(stubs.admin.DumpRequest(manager=big)),
        lambda: witness.weights.Get(stubs.weights.GetRequest(name=big)),
        lambda: manager.acquire(big),
        lambda: manager.offload.OpenManager(stubs.offload.OpenManagerRequest(name=big)),
        lambda: witness.weights.Put(requests(stubs, [header(name=big)])),
        lambda: witness.weights.Put(requests(stubs, [header(), declared(), data(0, 4 << 20)])),
        lambda: manager.offload.RegisterModel(iter([layers])),
    )
    for call in calls:
        details = witness.refuses(call, "INVALID_ARGUMENT", "message", "4194304", before=before)
        assert "4194" in details["value"]
    mebibyte = [header(), declared(shape=[2 << 20]), data(0, (1 << 20) + 1)]
    witness.refuses(
        lambda: witness.weights.Put(requests(stubs, mebibyte)),
        "INVALID_ARGUMENT", "data[w].bytes", "1048576", before=before,
    )


def test_a_request_id_used_again_with_other_content_is_refused(scene, stubs):
    _, _, manager, witness = scene
    layers = list(manager.layers)
    acquire = stubs.offload.AcquireRequest(
        request_id=request_id(), token=manager.token, layer=layers[0]
    )
    hold = manager.offload.Acquire(acquire).hold
    acquire.layer = layers[1]
    witness.refuses(
        lambda: manager.offload.Acquire(acquire),
        "INVALID_ARGUMENT", "request_id", "another request",
    )
    release = stubs.offload.ReleaseRequest(
        request_id=request_id(), token=manager.token, hold=hold
    )
    manager.offload.Release(release)
    manager.offload.Release(release)
    release.hold += 1
    witness.refuses(
        lambda: manager.offload.Release(release), "INVALID_ARGUMENT", "request_id"
    )
    same = request_id()
    put = lambda name: witness.weights.Put(
        requests(stubs, [{"header": {"request_id": same, "name": name}}, declared(), data(0, 4096)])
    )
    assert put("one").set.id == put("one").set.id
    witness.refuses(lambda: put("two"), "INVALID_ARGUMENT", "request_id", "another request")


def test_cancelled_streams_and_calls_leave_nothing(scene, stubs):
    _, channel, manager, witness = scene
    layers = list(manager.layers)
    before = witness.snapshot()

    def slow(parts):
        yield from requests(stubs, parts)
        time.sleep(30)

    for parts in ([], [header()], [header(), declared()], [header(), declared(), data(0, 9)]):
        call = witness.weights.Put.future(slow(parts))
        time.sleep(0.2)
        call.cancel()
        witness.unchanged(before)
    lease = manager.offload.OpenManager(
        stubs.offload.OpenManagerRequest(
            request_id=request_id(), name="short", protocol={"lowest": 1, "highest": 1}
        )
    )
    token = next(lease).opened.token
    opened = witness.snapshot()

    def half(count):
        register = stubs.offload.RegisterModelRequest
        ids = {"request_id": request_id(), "token": token, "weight_set": "model"}
        yield register(header={**ids, "budget_bytes": 2_000_000})
        for name in layers[:count]:
            yield register(layers={"layers": [{"name": name, "tensors": manager.layers[name]}]})
        time.sleep(30)

    for count in (0, 1, 3):
        call = manager.offload.RegisterModel.future(half(count))
        time.sleep(0.2)
        call.cancel()
        witness.unchanged(opened)
    lease.cancel()
    witness.unchanged(before)
    with pytest.raises(grpc.RpcError):
        manager.offload.CloseManager(
            stubs.offload.CloseManagerRequest(request_id=request_id(), token=token)
        )
    # acquires that are given up while they wait, or as they are answered: what was held
    # then is had again by the same id, and nothing else is
    held = manager.acquire(layers[0])
    given_up = []
    for pause in (0, 0.001, 0.01, 0.1):
        for layer in layers[1:]:
            request = stubs.offload.AcquireRequest(
                request_id=request_id(), token=manager.token, layer=layer
            )
            future = manager.offload.Acquire.future(request)
            time.sleep(pause)
            if future.cancel():
                given_up.append(request)
            elif future.exception() is None:
                manager.release(future.result().hold)
            # many resets at once are answered by the end of the connection
            time.sleep(0.01)
    manager.release(held.hold)
    while given_up:
        # one that was answered too late is in the way of others until its turn comes
        left = [request for request in given_up if not taken_up(manager, request)]
        assert len(left) < len(given_up)
        given_up = left
    deadline = time.monotonic() + 10
    while True:
        (mine,) = witness.admin.Status(stubs.admin.StatusRequest()).managers
        if mine.rpc_holds == 0 and mine.parts_in_use == 0:
            break
        assert time.monotonic() < deadline, mine
        time.sleep(0.05)
    for layer in layers:
        manager.release(manager.acquire(layer).hold)


def taken_up(manager, request):
    """Acquires by the id of a call that was given up, and releases; whether that worked."""
    try:
        manager.release(manager.offload.Acquire(request, timeout=30).hold)
    except grpc.RpcError as error:
        assert error_info(error)[0] == "HOLD_CONFLICT", error
        return False
    return True


CALLS = [
    f"/flextensor.v1.{service}/{call}"
    for service, calls in {
        "Offload": "OpenManager RegisterModel GetPlan Acquire Release ReportPass CloseManager",
        "Weights": "Load Put Get List Drop",
        "Admin": "Status Dump TerminateManager Nosuch",
    }.items()
    for call in calls.split()
]


def test_random_bytes_as_requests_change_nothing(scene):
    daemon, _, _, witness = scene
    before = witness.snapshot()
    source = random.Random(20240607)
    codes = set()
    for round in range(30):
        for path in CALLS:
            call = daemon.grpc.stream_stream(path)
            parts = [source.randbytes(source.choice((0, 1, 7, 64, 3000))) for _ in range(2)]
            if source.random() < 0.5:
                # a plausible field with a wrong length or type
                parts[0] = bytes([source.randrange(1, 64), source.randrange(256)]) + parts[0]
            try:
                answers = call(iter(parts), timeout=10)
                for _ in zip(answers, range(3)):
                    pass
                answers.cancel()
            except grpc.RpcError as error:
                codes.add(error.code())
                assert error.code() not in (
                    grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE,
                ), f"{path} {parts}: {error}"
        if round % 10 == 9:
            witness.unchanged(before)
    assert grpc.StatusCode.INVALID_ARGUMENT in codes


def test_calls_that_the_daemon_does_not_have_are_refused_by_name(scene):
    daemon, _, _, witness = scene
    before = witness.snapshot()
    for path in (
        "/flextensor.v1.Admin/Nosuch", "/flextensor.v1.Nosuch/Status", "/Nosuch", "/" + "x" * 3000,
    ):
        call = daemon.grpc.unary_unary(path)
        details = witness.refuses(
            lambda: call(b""), "UNIMPLEMENTED", "method", "services", before=before
        )
        assert details["value"] == path[:128]


def test_random_bytes_on_the_grpc_socket_end_only_their_connection(scene):
    daemon, _, _, witness = scene
    before = witness.snapshot()
    source = random.Random(7)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
    for round in range(60):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(daemon.sockets / "flextensord.sock"))
            noise = source.randbytes(source.choice((1, 100, 20_000)))
            frame = len(noise[:9000]).to_bytes(3, "big") + bytes(
                [source.randrange(12), source.randrange(256), 0, 0, 0, source.randrange(5)]
            )
            opening = (b"", preface, preface + frame)[round % 3]
            try:
                connection.sendall(opening + noise)
            except (BrokenPipeError, ConnectionResetError):
                pass
    witness.unchanged(before)
