"""What others notice of a client that is killed or stopped, and what a client notices of a
daemon that is gone."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable

from bench import Bench, Suite
from consumer import Consumer, Layer, Run, consume_until_told
from correctness import evenly, judge, load
from daemon import Daemon
from machine import GIB, MIB
from peer import Line, Peer

SUITE = Suite()
STALL = 1.0
# the GPU's free memory moves a little by what processes load when they first need it
SLACK = 64 * MIB


def stream_on(line: Line, run: Run) -> None:
    """Passes without end, a tiny kernel a layer: its stream waits for the link most of the
    time."""
    consumer = Consumer(run)
    line.put(consumer.answer)
    while True:
        consumer.steps(consumer.layers, consumer.touch)
        consumer.torch.cuda.synchronize()


def hold_on(line: Line, run: Run) -> None:
    """Holds a streamed layer for ever, once its bytes are there."""
    consumer = Consumer(run)
    streamed = next(layer for layer in consumer.layers if layer.streamed)
    consumer.manager.acquire(streamed.index, consumer.stream())
    consumer.touch(streamed)
    consumer.torch.cuda.synchronize()
    line.put(consumer.answer)
    while True:
        time.sleep(60)


def free_memory() -> int:
    """The GPU's free memory, by the driver."""
    import torch

    return torch.cuda.mem_get_info()[0]


def free_at_least(wanted: int) -> bool:
    return free_memory() >= wanted


def since(limit: float, began: float, reached: Callable[[], bool]) -> float:
    """Seconds since `began` until `reached`, or `limit` and more."""
    while not reached():
        if time.monotonic() - began > limit:
            return time.monotonic() - began
        time.sleep(0.002)
    return time.monotonic() - began


def observer(bench: Bench, daemon: Daemon) -> Peer:
    """A client that streams and compares beside what happens."""
    run = load(bench, daemon, evenly(32, 16 * MIB), 100, budget=52 * MIB)
    run.name = "observer"
    made = bench.peer(consume_until_told, run, name="observer")
    made.get(60)
    return made


def judge_observer(bench: Bench, peer: Peer) -> list[tuple[float, float]]:
    """Ends the observer; its bytes were right and it never stood still."""
    peer.put("end")
    found = peer.get(30)
    judge(bench, found, "observer")
    longest = max(end - begin for begin, end in found["passes"])
    bench.check("observer's longest pass", longest, "s", at_most=STALL)
    bench.say(f"the observer made {len(found['passes'])} passes")
    return found["passes"]


def killed(bench: Bench, work: Callable, times: int, ready: Callable[[Daemon], bool]) -> None:
    """Kills a client again and again once `ready` says so; its memory and its name come back."""
    import flextensord
    import torch

    torch.zeros(1, device="cuda")
    daemon = bench.daemon()
    watched = observer(bench, daemon)
    run = load(bench, daemon, evenly(12, 64 * MIB), 101, budget=400 * MIB)
    run.name = "victim"
    client = flextensord.Client(runtime_dir=run.runtime_dir)
    back, named, died = [], [], []
    chance = random.Random(101)
    for number in range(times):
        before = free_memory()
        victim = bench.peer(work, run, name=f"victim-{number}")
        victim.get(60)
        time.sleep(0.1 + 0.2 * chance.random())
        # at the right moment, or in the end at any
        since(2, time.monotonic(), lambda: ready(daemon))
        taken = before - free_memory()
        began = time.monotonic()
        victim.kill()
        dead = time.monotonic()
        died.append(dead - began)

        def is_free() -> bool:
            try:
                client.open_manager("victim").close()
            except flextensord.FlextensordError:
                return False
            return True

        wanted = before - SLACK
        back.append(since(5, dead, functools.partial(free_at_least, wanted)))
        named.append(since(5, dead, is_free))
        bench.say(
            f"victim {number}: {taken / MIB:.0f} MiB held, dead after {died[-1]:.2f} s, memory "
            f"back after {back[-1]:.3f} s more, name free after {named[-1]:.3f} s"
        )
    bench.check("memory back after its death, at most", max(back), "s", at_most=1)
    bench.check("name free after its death, at most", max(named), "s", at_most=1)
    judge_observer(bench, watched)
    device = daemon.status()["devices"][0]
    bench.check("bytes still being reclaimed", device["reclaiming_bytes"], at_most=0)


def waits(daemon: Daemon) -> bool:
    """Whether the victim's stream waits for a part."""
    manager = daemon.manager("victim")
    return manager is not None and manager["waits_for_part"] is not None


@SUITE.case(limit=80)
def killed_while_its_stream_waits(bench: Bench) -> None:
    killed(bench, stream_on, 4, waits)


@SUITE.case(limit=80)
def killed_while_it_holds(bench: Bench) -> None:
    killed(bench, hold_on, 3, lambda _: True)


@SUITE.case(limit=80)
def killed_while_copies_fly(bench: Bench) -> None:
    """At any moment of streaming: the link is never at rest."""
    killed(bench, stream_on, 4, lambda daemon: daemon.status()["devices"][0]["queued_bytes"] > 0)


@SUITE.case(limit=150)
def stopped_for_a_minute(bench: Bench) -> None:
    """A stopped client changes nothing for the one beside it, and goes on as if nothing was."""
    daemon = bench.daemon()
    watched = observer(bench, daemon)
    alone = [time.monotonic(), time.monotonic()]
    time.sleep(5)
    alone[1] = time.monotonic()
    run = load(bench, daemon, evenly(16, 32 * MIB), 102, budget=100 * MIB)
    run.name = "sleeper"
    sleeper = bench.peer(consume_until_told, run, name="sleeper")
    sleeper.get(60)
    time.sleep(2)
    sleeper.pause()
    bench.say("stopped")
    # what was queued on its stream still runs, and its ring fills
    time.sleep(2)
    stopped = [time.monotonic(), time.monotonic()]
    time.sleep(58)
    stopped[1] = time.monotonic()
    owned = daemon.manager("sleeper")
    bench.check("the stopped one keeps its manager", owned is not None, at_least=1)
    sleeper.resume()
    resumed = time.monotonic()
    bench.say("goes on")
    time.sleep(4)
    sleeper.put("end")
    found = sleeper.get(30)
    judge(bench, found, "sleeper")
    later = sum(begin > resumed for begin, _ in found["passes"])
    bench.check("passes of the stopped one afterwards", later, at_least=10)
    passes = judge_observer(bench, watched)

    def median(window: list[float]) -> float:
        low, high = window
        return statistics.median(
            end - begin for begin, end in passes if begin >= low and end <= high
        )

    bench.result.notes["step alone, s"] = median(alone)
    bench.result.notes["step beside the stopped one, s"] = median(stopped)
    change = median(stopped) / median(alone)
    bench.check("step beside the stopped one to alone", change, "x", 0.95, 1.05)


def note_first(into, layer: Layer) -> None:
    """Queues a read of the first byte of a held layer."""
    into.add_(layer.head + 1)


def strand(line: Line, run: Run) -> dict:
    """Queues a pass that no daemon serves, and says how it ends."""
    import flextensord

    consumer = Consumer(run)
    torch = consumer.torch
    consumer.steps(consumer.layers, consumer.verify)
    line.put(consumer.found())
    line.get()
    read = torch.zeros(len(consumer.layers), dtype=torch.int64, device="cuda")
    for at, layer in enumerate(consumer.layers):
        consumer.step(layer, functools.partial(note_first, read[at]))
    line.put("queued")
    # the daemon may be killed now: a wait that nobody answers
    try:
        torch.cuda.synchronize()
        fault = ""
    except RuntimeError as error:
        fault = str(error).splitlines()[0]
    ended = time.monotonic()
    said = {"kind": "", "text": "", "retryable": None}
    # the fault may be seen before the client has heard of its own end
    until = time.monotonic() + 10
    while time.monotonic() < until and said["kind"] != "DAEMON_LOST":
        try:
            consumer.manager.acquire(consumer.layers[0].index, consumer.stream())
            said["kind"] = "none"
        except flextensord.FlextensordError as error:
            said = {"kind": error.kind, "text": str(error), "retryable": error.retryable}
        time.sleep(0.05)
    return {"fault": fault, "ended": ended, "state": consumer.manager.lease_state} | said


@SUITE.case(limit=90)
def the_end_of_patience(bench: Bench) -> None:
    """A client whose daemon is gone for good: its queued kernels fault, and it is told why."""
    daemon = bench.daemon()
    run = load(bench, daemon, evenly(24, 16 * MIB), 103, budget=52 * MIB, patience=5.0)
    run.name = "stranded"
    peer = bench.peer(strand, run, name="stranded")
    judge(bench, peer.get(60), "before")
    daemon.pause()
    time.sleep(0.3)
    peer.put("queue")
    peer.get(20)
    time.sleep(0.5)
    bench.check("it waits while the daemon stands still", peer.silent(), at_least=1)
    killed_at = time.monotonic()
    daemon.kill()
    bench.say("the daemon is killed")
    said = peer.get(40)
    bench.result.notes["said"] = said
    bench.say(f"fault: {said['fault'] or 'none'}; then {said['kind']}: {said['text']}")
    bench.check("queued kernels fault", bool(said["fault"]), at_least=1)
    bench.check("they do so after", said["ended"] - killed_at, "s", 4.5, 15)
    bench.check("DAEMON_LOST is raised", said["kind"] == "DAEMON_LOST", at_least=1)


@SUITE.case(limit=90)
def an_end_in_order(bench: Bench) -> None:
    """A client that ends in order gives everything back at once."""
    import torch

    torch.zeros(1, device="cuda")
    daemon = bench.daemon()
    watched = observer(bench, daemon)
    run = load(bench, daemon, evenly(12, 64 * MIB), 104, budget=GIB)
    run.name = "leaver"
    before = free_memory()
    leaver = bench.peer(consume_until_told, run, name="leaver")
    leaver.get(60)
    taken = before - free_memory()
    bench.check("memory that it held", taken / MIB, "MiB", at_least=768)
    leaver.put("end")
    judge(bench, leaver.get(30), "leaver")
    began = time.monotonic()
    leaver.process.join(10)
    back = since(5, began, functools.partial(free_at_least, before - SLACK))
    bench.check("memory back after its end", back, "s", at_most=1)
    judge_observer(bench, watched)
