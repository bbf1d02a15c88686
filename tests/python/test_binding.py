"""The Python module against a daemon with a CPU device: what it says, and how it fails. What needs
a GPU stands in tests/gpu."""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))

import checkpoint  # noqa: E402
import machine  # noqa: E402
from conftest import TARGET  # noqa: E402

TENSORS = [checkpoint.flat(f"layers.{at}.weight", 1 << 20) for at in range(8)]
LAYERS = [(tensor.name.removesuffix(".weight"), [tensor.name]) for tensor in TENSORS]


@pytest.fixture(scope="session")
def flextensord(tmp_path_factory):
    library = TARGET / "lib_native.so"
    if not library.exists():
        pytest.fail("the module is not built: cargo build -p flextensord-py")
    sys.path.insert(0, str(machine.module(library, tmp_path_factory.mktemp("module"))))
    import flextensord

    return flextensord


@pytest.fixture
def client(flextensord, daemon, tmp_path):
    runtime_dir = daemon().directory / "run"
    made = flextensord.Client(runtime_dir=str(runtime_dir))
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, TENSORS, 1)
    loaded = made.load(path, "set")
    assert loaded["name"] == "set" and not loaded["attached"]
    return made


def test_a_daemon_that_is_not_there_is_unreachable(flextensord, tmp_path):
    with pytest.raises(flextensord.FlextensordError) as raised:
        flextensord.Client(runtime_dir=str(tmp_path))
    assert raised.value.kind == "UNREACHABLE"
    assert raised.value.retryable is True
    assert "flextensord serve" in raised.value.remedy
    assert flextensord.FlextensordError.__module__ == "flextensord._native"
    assert issubclass(flextensord.FlextensordError, RuntimeError)


def test_status_says_what_there_is(client):
    with client.open_manager("one", link_weight=50) as manager:
        answer = manager.register("set", LAYERS, budget_bytes=4 << 20)
        assert answer["layers"] == 8 and answer["streamed_bytes"] > 0
        status = client.status()
        assert status["phase"] == "serving"
        (device,) = status["devices"]
        assert device["ring_bytes"] >= answer["ring_bytes"]
        assert device["transfer"]["protocol_violations"] == 0
        (said,) = status["managers"]
        assert said["name"] == manager.name == "one"
        assert said["owner_pid"] == os.getpid()
        assert said["waits_for_part"] is None
        assert status["weight_sets"][0]["attached_by"] == ["one"]
    assert client.status()["managers"] == []
    assert client.drop_weights("set") > 0


def test_a_layer_has_a_number_and_a_name(flextensord, client):
    manager = client.open_manager()
    assert manager.name == "default" and manager.device == "cpu:0"
    assert manager.lease_state == "live"
    manager.register("set", LAYERS, memory_fraction=0.5)
    assert [manager.layer(name) for name, _ in LAYERS] == list(range(8))
    with pytest.raises(flextensord.FlextensordError) as raised:
        manager.layer("no such layer")
    assert raised.value.kind == "NOT_FOUND"
    with pytest.raises(flextensord.FlextensordError) as raised:
        manager.acquire(8, 0)
    assert raised.value.kind == "NOT_FOUND"
    assert manager.report_pass() == 1
    assert manager.report_pass(2) == 3


def test_a_cpu_device_has_no_streams(flextensord, client):
    manager = client.open_manager()
    manager.register("set", LAYERS, budget_bytes=4 << 20)
    with pytest.raises(flextensord.FlextensordError) as raised:
        manager.acquire(0, 0)
    assert raised.value.kind == "WRONG_DEVICE"


def test_a_refusal_keeps_its_kind(flextensord, client):
    manager = client.open_manager("one")
    with pytest.raises(flextensord.FlextensordError) as raised:
        manager.register("set", LAYERS, budget_bytes=1 << 16)
    assert raised.value.kind == "BUDGET_INFEASIBLE"
    assert raised.value.retryable is False
    with pytest.raises(flextensord.FlextensordError) as raised:
        client.open_manager("one")
    assert raised.value.kind == "MANAGER_TAKEN"
    with pytest.raises(ValueError, match="budget_bytes or memory_fraction"):
        manager.register("set", LAYERS)


def test_a_closed_manager_says_so_and_its_name_is_free(flextensord, client):
    manager = client.open_manager("one")
    manager.close()
    manager.close()
    assert manager.lease_state == "ended"
    with pytest.raises(flextensord.FlextensordError) as raised:
        manager.layer("layers.0")
    assert raised.value.kind == "FAILED_PRECONDITION"
    again = client.open_manager("one")
    # dropped, it is closed
    del again
    client.open_manager("one").close()


def test_a_forked_child_owns_nothing(flextensord, client):
    manager = client.open_manager("one")
    manager.register("set", LAYERS, budget_bytes=4 << 20)
    child = os.fork()
    if child == 0:
        kinds = []
        for call in (client.status, lambda: manager.layer("layers.0"), manager.report_pass):
            try:
                call()
            except flextensord.FlextensordError as error:
                kinds.append(error.kind)
        os._exit(0 if kinds.count("FORKED") >= 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.status()["managers"][0]["name"] == "one"
    assert manager.report_pass() == 1
