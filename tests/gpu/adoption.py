"""The daemon is killed in the middle of passes, and its successor goes on where it was."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from bench import Bench, Suite
from consumer import Consumer, Run, consume_until_told
from correctness import evenly, judge, load
from daemon import Daemon
from faults import SLACK, free_at_least, free_memory, since
from machine import MIB
from peer import Line, Peer
from throughput import big

SUITE = Suite()
KEEP = ("--on-stop", "keep")
STALL = 1.5
PINNED = 3.0


def replay_until_told(line: Line, run: Run) -> dict:
    """Replays of a captured pass with all bytes compared inside."""
    consumer = Consumer(run)
    graph, cuda = consumer.captured_pass(), consumer.torch.cuda
    line.put(consumer.answer)
    passes = []
    while not line.asked():
        began = time.monotonic()
        graph.replay()
        cuda.synchronize()
        passes.append((began, time.monotonic()))
    found = consumer.found() | {"passes": passes}
    consumer.close()
    return found


def filled(daemon: Daemon, name: str) -> int:
    manager = daemon.manager(name)
    return manager["transfer"]["parts_filled"] if manager else 0


def kills(bench: Bench, daemon: Daemon, peer: Peer, name: str, times: int, total: int) -> None:
    """Kills the daemon again and again and starts it at once, as a supervisor would."""
    chance = random.Random(7)
    flows, pinned = [], []
    for number in range(times):
        time.sleep(0.2 + 0.6 * chance.random())
        began = time.monotonic()
        daemon.kill()
        dead = time.monotonic() - began
        daemon.again()
        daemon.serve_within(20)
        serves = time.monotonic() - began
        flow = since(20, began, lambda: filled(daemon, name) > 0)
        whole = since(
            20, began, lambda: daemon.pinned_bytes() >= total
        )
        flows.append(flow)
        pinned.append(whole)
        bench.say(
            f"kill {number}: dead after {dead:.2f} s, serves after {serves:.2f} s, first part after "
            f"{flow:.2f} s, all pinned after {whole:.2f} s"
        )
    bench.check("kills", len(flows), at_least=times)
    bench.check("kill to next part, median", statistics.median(flows), "s", at_most=STALL)
    bench.check("kill to next part, most", max(flows), "s")
    bench.check("kill to all pinned, median", statistics.median(pinned), "s", at_most=PINNED)
    bench.check("the client still runs", peer.silent(), at_least=1)


def mid_pass(bench: Bench, work: Callable, times: int) -> None:
    daemon, run = big(bench, *KEEP)
    total = sum(tensor.bytes for tensor in run.tensors)
    run.name, run.patience = "survivor", 30.0
    run.budget = int(0.3 * total)
    before = free_memory()
    peer = bench.peer(work, run, name="survivor")
    peer.get(90)
    kills(bench, daemon, peer, "survivor", times, total)
    peer.put("end")
    found = peer.get(60)
    judge(bench, found)
    spans = [end - begin for begin, end in found["passes"]]
    bench.check("passes", len(spans), at_least=times)
    bench.check("a pass, median", statistics.median(spans), "s")
    bench.check("a pass, longest", max(spans), "s")
    manager_gone = since(5, time.monotonic(), lambda: daemon.manager("survivor") is None)
    bench.check("name free after its end", manager_gone, "s", at_most=1)
    peer.process.join(20)
    daemon.stop(20)
    back = since(5, time.monotonic(), lambda: free_at_least(before - SLACK))
    bench.check("GPU memory back to the start after", back, "s", at_most=2)


@SUITE.case(limit=120)
def killed_in_mid_pass(bench: Bench) -> None:
    mid_pass(bench, consume_until_told, 10)


@SUITE.case(limit=120)
def killed_in_mid_replay(bench: Bench) -> None:
    mid_pass(bench, replay_until_told, 10)


@SUITE.case(limit=90)
def several_managers_share_residents_over_a_kill(bench: Bench) -> None:
    """Two processes with the same residents hand them back, and they are counted once."""
    daemon = bench.daemon(*KEEP)
    run = load(bench, daemon, evenly(32, 16 * MIB), 300, budget=300 * MIB)
    peers = []
    for name in ("one", "two"):
        run.name = name
        peers.append(bench.peer(consume_until_told, run, name=name))
    for peer in peers:
        peer.get(60)
    time.sleep(0.5)
    before = daemon.status()["devices"][0]["allocated_bytes"]
    for _ in range(3):
        daemon.kill()
        daemon.again()
        daemon.serve_within(20)
        time.sleep(1.5)
    after = daemon.status()["devices"][0]["allocated_bytes"]
    bench.check("allocated as before", after / MIB, "MiB", before / MIB, before / MIB)
    for peer in peers:
        peer.put("end")
        judge(bench, peer.get(30), peer.name)


@SUITE.case(limit=60)
def an_orderly_restart_hands_over(bench: Bench) -> None:
    """SIGTERM and a start, as an upgrade does, under a client that computes."""
    daemon = bench.daemon(*KEEP)
    run = load(bench, daemon, evenly(32, 16 * MIB), 301, budget=52 * MIB)
    run.name = "user"
    peer = bench.peer(consume_until_told, run, name="user")
    peer.get(60)
    for _ in range(3):
        time.sleep(0.4)
        bench.check("ended with", daemon.stop(20), at_least=0, at_most=0)
        daemon.again()
        daemon.serve_within(20)
    time.sleep(1)
    peer.put("end")
    found = peer.get(30)
    judge(bench, found)
    bench.check("passes", len(found["passes"]), at_least=10)
