"""50,000 tensors with long names in 500 layers through a stock client: no message is over
the 4 MiB that every gRPC library takes by default."""

import json
import subprocess
import time

import pytest

from conftest import TARGET, DescriptorChannel, request_id, safetensors
from test_contract import load

TENSORS, LAYERS = 50_000, 500
MOST = 4 << 20
# nothing here is timed closely; a step that takes this long is a fault
PATIENCE = 60


@pytest.fixture
def timed(request):
    """Notes how long each step takes, and prints it."""
    took = {}

    class Timed:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            self.begin = time.monotonic()

        def __exit__(self, *_):
            took[self.name] = round(time.monotonic() - self.begin, 2)

    yield Timed
    print(took)
    assert all(seconds < PATIENCE for seconds in took.values()), took


def test_a_model_of_many_tensors_with_long_names_fits_every_message(
    daemon, stubs, tmp_path, timed
):
    per_layer = TENSORS // LAYERS
    layers = {
        f"layers.{layer}.{'x' * 400}": [
            f"layers.{layer}.{'block.' * 70}{tensor}.weight" for tensor in range(per_layer)
        ]
        for layer in range(LAYERS)
    }
    assert all(len(name) > 430 for names in layers.values() for name in names)
    byte = lambda at: bytes([at % 251 + 1]) * (3 + at % 4)
    names = [name for names in layers.values() for name in names]
    tensors = {name: ("U8", [3 + at % 4], byte(at)) for at, name in enumerate(names)}
    served = daemon("--log", "warn", "--cpu-memory", "64MiB")
    channel = DescriptorChannel(served, stubs)
    path = safetensors(tmp_path / "many.safetensors", tensors)
    with timed("load"):
        loaded = load(served, stubs, channel, path, "many")
    assert loaded.set.tensors == TENSORS

    weights = stubs.weights_grpc.WeightsStub(served.grpc)
    offload = stubs.offload_grpc.OffloadStub(served.grpc)
    admin = stubs.admin_grpc.AdminStub(served.grpc)
    with timed("get"):
        seen, token = 0, ""
        while True:
            request = stubs.weights.GetRequest(name="many", page_size=2000, page_token=token)
            page = weights.Get(request)
            assert page.ByteSize() < MOST
            seen, token = seen + len(page.tensors), page.next_page_token
            if not token:
                break
        assert seen == TENSORS

    lease = offload.OpenManager(
        stubs.offload.OpenManagerRequest(
            request_id=request_id(), name="many", protocol={"lowest": 1, "highest": 1}
        )
    )
    token = next(lease).opened.token
    register = stubs.offload.RegisterModelRequest

    def registration():
        ids = {"request_id": request_id(), "token": token, "weight_set": "many"}
        # a third of the model: most of it would have to stream
        yield register(header={**ids, "budget_bytes": 5 << 20})
        for name, names in layers.items():
            yield register(layers={"layers": [{"name": name, "tensors": names}]})

    with timed("register"):
        registered = offload.RegisterModel(registration(), timeout=PATIENCE)
    assert (registered.layers, registered.parts) == (LAYERS, TENSORS)
    assert registered.streamed_bytes > 0

    with timed("get plan"):
        pages = list(offload.GetPlan(stubs.offload.GetPlanRequest(token=token, tickets=True)))
    assert max(page.ByteSize() for page in pages) < MOST
    memory = pages[0].memory
    assert sum(len(page.parts) for page in pages) == TENSORS
    assert sum(len(page.layers) for page in pages) == LAYERS
    maps = [channel.map(each.ticket) for each in memory.allocations]

    with timed("acquire and release"):
        for name, names in layers.items():
            request = stubs.offload.AcquireRequest(
                request_id=request_id(), token=token, layer=name
            )
            hold = offload.Acquire(request, timeout=PATIENCE)
            assert hold.ByteSize() < MOST and len(hold.parts) == per_layer
            for part in hold.parts:
                right = tensors[part.tensors[0].name][2]
                assert maps[part.allocation][part.offset : part.offset + len(right)] == right
            offload.Release(
                stubs.offload.ReleaseRequest(request_id=request_id(), token=token, hold=hold.hold)
            )

    with timed("status"):
        assert admin.Status(stubs.admin.StatusRequest()).ByteSize() < MOST
    with timed("dump"):
        records = list(admin.Dump(stubs.admin.DumpRequest()))
    assert max(len(record.json) for record in records) <= 1 << 20
    entries = {"tensors": 0, "layers": 0, "parts": 0}
    for record in records:
        if record.kind in entries:
            entries[record.kind] += len(json.loads(record.json))
    assert entries == {"tensors": TENSORS, "layers": LAYERS, "parts": TENSORS}

    ctl = [str(TARGET / "flextensorctl"), "--socket", str(served.sockets / "flextensord.sock")]
    with timed("flextensorctl layers"):
        listed = subprocess.run([*ctl, "--json", "layers", "many"], capture_output=True, check=True)
    assert len(json.loads(listed.stdout)["layers"]) == LAYERS
    with timed("flextensorctl dump"):
        dumped = subprocess.run([*ctl, "dump"], capture_output=True, check=True)
    assert dumped.stdout.count(b"block.") > TENSORS
    lease.cancel()
