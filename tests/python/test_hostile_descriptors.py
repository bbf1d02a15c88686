"""The descriptor channel: what is no readable regular file is refused, and so are packets
that are no requests; the connection and the daemon go on."""

import array
import os
import random
import socket

import pytest

from conftest import DescriptorChannel, request_id, safetensors
from test_contract import load, model
from witness import Witness


@pytest.fixture
def scene(daemon, stubs, tmp_path):
    served = daemon("--log", "warn")
    channel = DescriptorChannel(served, stubs)
    path = safetensors(tmp_path / "model.safetensors", model())
    load(served, stubs, channel, path, "model")
    return served, channel, path, Witness(served, stubs)


def refused(channel, request, descriptors=(), field="", rule=""):
    answer, given = channel.ask(request, descriptors)
    assert answer.WhichOneof("answer") == "refused", answer
    refusal = answer.refused
    assert not given and refusal.message
    assert field in refusal.field and rule in refusal.rule, refusal
    assert refusal.field and refusal.value and refusal.rule, refusal
    return refusal


def test_only_regular_files_open_for_reading_are_taken(scene, stubs, tmp_path):
    daemon, channel, path, witness = scene
    before = witness.snapshot()
    os.mkfifo(tmp_path / "pipe")
    pair = socket.socketpair()
    opened = {
        "pipe": os.open(tmp_path / "pipe", os.O_RDWR),
        "directory": os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY),
        "device": os.open("/dev/zero", os.O_RDONLY),
        "null": os.open("/dev/null", os.O_RDONLY),
        "path": os.open(path, os.O_PATH),
        "path of a directory": os.open(tmp_path, os.O_PATH),
        "write-only": os.open(path, os.O_WRONLY),
        "append-only": os.open(path, os.O_WRONLY | os.O_APPEND),
        "socket": os.dup(pair[0].fileno()),
        "eventfd": os.eventfd(0),
        "process": os.pidfd_open(os.getpid()),
    }
    for name, descriptor in opened.items():
        request = stubs.channel.ChannelRequest(offer={"file_names": [name]})
        refusal = refused(channel, request, [descriptor], "file_names", "regular file")
        assert refusal.kind == "INVALID_ARGUMENT" and name in refusal.value
        os.close(descriptor)
        witness.unchanged(before)
    for each in pair:
        each.close()
    assert channel.offer(path).offered.tickets


def test_offers_that_break_a_rule_are_refused_and_their_descriptors_closed(scene, stubs):
    _, channel, path, witness = scene
    before = witness.snapshot()
    descriptor = os.open(path, os.O_RDONLY)
    request = stubs.channel.ChannelRequest
    for names, count, rule in (
        ([], 0, "at least one"),
        (["a"], 0, "for each descriptor"),
        ([], 1, "for each descriptor"),
        (["a", "b"], 1, "for each descriptor"),
        (["a"], 2, "for each descriptor"),
        ([""], 1, "empty"),
        (["../a"], 1, "plain name"),
        (["/etc/passwd"], 1, "plain name"),
        ([".."], 1, "plain name"),
        (["a\0b"], 1, "control"),
        (["x" * 513], 1, "512"),
        (["a"] * 65, 65, "64 descriptors"),
        (["a"] * 200, 200, "64 descriptors"),
    ):
        offer = request(offer={"file_names": names})
        refused(channel, offer, [descriptor] * count, "", rule)
        witness.unchanged(before)
    # one good file does not carry a bad one in
    pair = os.pipe()
    offer = request(offer={"file_names": ["good", "bad"]})
    refused(channel, offer, [descriptor, pair[0]], "file_names", "regular file")
    for each in (*pair, descriptor):
        os.close(each)
    assert channel.offer(path).offered.tickets


def test_tickets_that_are_unknown_or_of_the_other_kind_are_refused(scene, stubs, tmp_path):
    daemon, channel, path, witness = scene
    redeem = lambda ticket: stubs.channel.ChannelRequest(redeem={"ticket": ticket})
    before = witness.snapshot()
    for ticket in (b"", b"\0" * 16, b"\xff" * 32, os.urandom(16), b"x" * 60_000):
        assert refused(channel, redeem(ticket), (), "ticket").kind == "NOT_FOUND"
    witness.unchanged(before)
    # a file that was handed over cannot be fetched, a segment cannot be loaded
    (ticket,) = channel.offer(path).offered.tickets
    refused(channel, redeem(ticket), (), "ticket")
    got = witness.weights.Get(stubs.weights.GetRequest(name="model", segment=True))
    request = stubs.weights.LoadRequest(
        request_id=request_id(), name="x", files=[got.segment_ticket]
    )
    with pytest.raises(Exception) as error:
        list(witness.weights.Load(request))
    assert "ticket" in str(error.value)


def test_a_segment_whose_name_is_gone_or_taken_is_served_by_descriptor(scene, stubs):
    """Case 19: the mapping by ticket has the daemon's bytes, whatever lies at the name."""
    daemon, channel, _, witness = scene
    (name,) = [entry.name for entry in os.scandir(daemon.shm)]
    right = (daemon.shm / name).read_bytes()

    def mapped():
        got = witness.weights.Get(stubs.weights.GetRequest(name="model", segment=True))
        return got.set.unlinked, channel.map(got.segment_ticket)[:]

    assert mapped() == (False, right)
    (daemon.shm / name).unlink()
    assert mapped() == (True, right)
    (daemon.shm / name).write_bytes(bytes(len(right)))
    assert mapped() == (True, right)
    witness.weights.Drop(stubs.weights.DropRequest(request_id=request_id(), name="model"))
    assert (daemon.shm / name).read_bytes() == bytes(len(right))


def test_random_packets_change_nothing_and_the_connection_goes_on(scene, stubs):
    daemon, channel, path, witness = scene
    before = witness.snapshot()
    source = random.Random(41)
    descriptor = os.open(path, os.O_RDONLY)
    for round in range(300):
        noise = source.randbytes(source.choice((1, 2, 30, 1000, 65_536, 65_537, 100_000)))
        if round % 2:
            noise = bytes([source.choice((0x0A, 0x12, 0x1A))]) + noise
        rights = [descriptor] * source.choice((0, 0, 1, 3))
        packed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", rights))]
        channel.socket.sendmsg([noise[:120_000]], packed if rights else [])
        packet, given, _, _ = socket.recv_fds(channel.socket, 65536, 64)
        assert packet and not given
        answer = stubs.channel.ChannelAnswer.FromString(packet)
        kind = answer.WhichOneof("answer")
        # two random bytes may well be a hello
        assert kind == "refused" or len(noise) < 31, answer
    os.close(descriptor)
    witness.unchanged(before)
    # many connections that say nothing, or vanish in mid-exchange
    for _ in range(50):
        silent = daemon.channel()
        silent.send(source.randbytes(40))
        silent.close()
    witness.unchanged(before)
    assert channel.offer(path).offered.tickets


def test_an_empty_packet_ends_its_connection_alone(scene, stubs):
    daemon, channel, path, witness = scene
    before = witness.snapshot()
    other = DescriptorChannel(daemon, stubs)
    other.socket.send(b"")
    assert other.socket.recv(65536) == b"", "closed, without an answer"
    other.socket.close()
    witness.unchanged(before)
    assert channel.offer(path).offered.tickets
