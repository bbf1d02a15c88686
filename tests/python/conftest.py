"""A daemon of the real binary, and plain grpcio stubs generated from the project's .proto:
nothing of the project's own client is used here, so that the .proto is the contract."""

import array
import importlib
import json
import mmap
import os
import pathlib
import socket
import struct
import subprocess
import sys
import time
import uuid

import grpc
import pytest
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto" / "proto"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug"


@pytest.fixture(scope="session")
def stubs(tmp_path_factory):
    """Generated modules: .offload, .weights, .admin, .channel, each with messages and stubs."""
    out = tmp_path_factory.mktemp("stubs")
    files = [str(path) for path in sorted((PROTO / "flextensor" / "v1").glob("*.proto"))]
    args = ["protoc", f"-I{PROTO}", f"--python_out={out}", f"--grpc_python_out={out}", *files]
    assert protoc.main(args) == 0
    sys.path.insert(0, str(out))

    class Stubs:
        pass

    for name in ("offload", "weights", "admin", "channel"):
        setattr(Stubs, name, importlib.import_module(f"flextensor.v1.{name}_pb2"))
        services = importlib.import_module(f"flextensor.v1.{name}_pb2_grpc")
        setattr(Stubs, f"{name}_grpc", services)
    return Stubs


class Daemon:
    """A daemon in directories of its own."""

    def __init__(self, directory, *flags, descriptors=None):
        self.directory = directory
        self.shm = directory / "shm"
        self.shm.mkdir()
        self.sockets = directory / "run" / "default"
        command = [TARGET / "flextensord", "serve", "--device", "cpu"]
        command += ["--runtime-dir", directory / "run", "--shm-dir", self.shm, "--drain-grace", "200ms", *flags]
        limited = ["prlimit", f"--nofile={descriptors}"] if descriptors else []
        self.process = subprocess.Popen([*limited, *(str(part) for part in command)])
        deadline = time.monotonic() + 20
        while True:
            try:
                self.channel().close()
                break
            except OSError:
                assert self.process.poll() is None, "daemon ended at its start"
                assert time.monotonic() < deadline, "daemon does not serve"
                time.sleep(0.01)
        # grpcio derives an authority from the path that HTTP/2 does not allow
        options = [("grpc.default_authority", "localhost")]
        self.grpc = grpc.insecure_channel(f"unix:{self.sockets / 'flextensord.sock'}", options)
        grpc.channel_ready_future(self.grpc).result(timeout=20)

    def channel(self):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(10)
        connection.connect(str(self.sockets / "fd.sock"))
        return connection

    def stop(self):
        self.grpc.close()
        self.process.terminate()
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()


@pytest.fixture
def daemon(tmp_path):
    made = []

    def make(*flags, **more):
        made.append(Daemon(tmp_path, *flags, **more))
        return made[-1]

    yield make
    for each in made:
        assert each.stop() == 0


def request_id():
    return uuid.uuid4().hex


class DescriptorChannel:
    """The descriptor channel by its packets."""

    def __init__(self, daemon, stubs):
        self.messages = stubs.channel
        self.socket = daemon.channel()
        answer, _ = self.ask(self.messages.ChannelRequest(hello={"protocol": 1}))
        assert answer.welcome.protocol == 1
        self.generation = answer.welcome.daemon_generation

    def ask(self, request, descriptors=()):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.socket.sendmsg([request.SerializeToString()], rights if descriptors else [])
        packet, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 64)
        return self.messages.ChannelAnswer.FromString(packet), descriptors

    def offer(self, path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            request = self.messages.ChannelRequest(offer={"file_names": [path.name]})
            answer, _ = self.ask(request, [descriptor])
        finally:
            os.close(descriptor)
        return answer

    def redeem(self, ticket):
        request = self.messages.ChannelRequest(redeem={"ticket": ticket})
        answer, descriptors = self.ask(request)
        assert answer.WhichOneof("answer") == "redeemed", answer
        return descriptors[0], answer.redeemed.bytes

    def map(self, ticket, writable=False):
        descriptor, size = self.redeem(ticket)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            return mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
        finally:
            os.close(descriptor)


def safetensors(path, tensors):
    """Writes {name: (dtype, shape, bytes)} as a safetensors file."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [offset, offset + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        offset += len(data)
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path
