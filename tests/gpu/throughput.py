"""Bytes a second: streaming, loading, and what copies cost the kernels beside them."""

from __future__ import annotations

import pathlib
import statistics
import threading
import time

import link
import model
from bench import Bench
from checkpoint import threads
from consumer import Consumer, Run, warm
from daemon import Daemon
from machine import GIB, MIB
from peer import Line

SEED = 200
# of the weights of the Linears: what a manager may hold
SHARE = 0.02
AHEAD = 32


def big(bench: Bench, *flags: str) -> tuple[Daemon, Run]:
    """A daemon with the Linears of the 13 GiB model, and how to run them in a small ring."""
    import flextensord

    tensors = model.linears()
    path = bench.checkpoint(tensors, SEED, keep="linears")
    bench.say("the checkpoint is there")
    daemon = bench.daemon("--load-threads", str(threads()), *flags)
    client = flextensord.Client(runtime_dir=str(daemon.runtime_dir))
    # the content is vouched for: hashing is a figure of its own
    client.load(str(path), "linears", content_id="linears")
    bench.say("it is loaded")
    total = sum(tensor.bytes for tensor in tensors)
    run = Run(str(daemon.runtime_dir), "linears", SEED, tensors, model.layers_of(tensors))
    run.budget = int(SHARE * total)
    return daemon, run


def paced(consumer: Consumer, passes: int) -> list[float]:
    """Seconds of each pass, a tiny kernel a layer, never more than a few layers ahead."""
    cuda = consumer.torch.cuda
    ends = [cuda.Event(enable_timing=True) for _ in range(passes + 1)]
    marks = []
    ends[0].record()
    for number in range(passes):
        for at, layer in enumerate(consumer.layers):
            consumer.step(layer, consumer.touch)
            if at % AHEAD == 0:
                marks.append(cuda.Event())
                marks[-1].record()
                if len(marks) > 3:
                    marks.pop(0).synchronize()
        ends[number + 1].record()
    cuda.synchronize()
    return [one.elapsed_time(two) / 1e3 for one, two in zip(ends, ends[1:], strict=False)]


def streaming(bench: Bench) -> None:
    daemon, run = big(bench)
    warm()
    before = link.bare_rate()
    bench.say(f"bare link {before / 1e9:.2f} GB/s")
    rates = {}
    for share in (SHARE, 0.027):
        run.budget = int(share * sum(tensor.bytes for tensor in run.tensors))
        run.name = f"share-{share}"
        consumer = Consumer(run)
        seconds = paced(consumer, 14)
        moved = consumer.answer["streamed_bytes"]
        counted = (daemon.manager(run.name) or {}).get("transfer", {})
        bench.result.notes[run.name] = {
            "passes_s": seconds,
            "answer": consumer.answer,
            "transfer": counted,
        }
        rates[share] = moved / statistics.median(seconds[2:])
        bench.say(
            f"{moved / GIB:.2f} GiB a pass through {consumer.answer['ring_bytes'] / MIB:.0f} MiB: "
            f"{rates[share] / 1e9:.2f} GB/s"
        )
        bench.check(f"streamed at {share}", moved / GIB, "GiB", at_least=12.5)
        consumer.close()
    after = link.bare_rate()
    bare = statistics.median([before, after])
    bench.check("bare link before", before / 1e9, "GB/s")
    bench.check("bare link after", after / 1e9, "GB/s")
    bench.check("streamed", rates[SHARE] / 1e9, "GB/s")
    bench.check("of the bare link", 100 * rates[SHARE] / bare, "%", at_least=99)
    bench.check("of the bare link, at 2.7 %", 100 * rates[0.027] / bare, "%")


def stream_passes(line: Line, run: Run, passes: int) -> dict:
    """A peer that streams; it begins when it is told to."""
    consumer = Consumer(run)
    paced(consumer, 1)
    line.put("ready")
    line.get()
    began = time.monotonic()
    seconds = paced(consumer, passes)
    found = {"seconds": seconds, "bytes": consumer.answer["streamed_bytes"], "began": began}
    line.put(found)
    # the other one may still measure
    line.get()
    consumer.close()
    return found


def two_managers(bench: Bench) -> None:
    _, run = big(bench)
    warm()
    before = link.bare_rate()
    peers = []
    for name in ("one", "two"):
        run.name = name
        peers.append(bench.peer(stream_passes, run, 12, name=name))
    for peer in peers:
        peer.get(60)
    for peer in peers:
        peer.put("begin")
    found = [peer.get(60) for peer in peers]
    for peer in peers:
        peer.put("end")
        peer.get(30)
    after = link.bare_rate()
    bare = statistics.median([before, after])
    # not the first passes, and not the last ones, in which one may be alone
    rates = [each["bytes"] / statistics.median(each["seconds"][2:-2]) for each in found]
    bench.result.notes["found"] = found
    bench.check("bare link", bare / 1e9, "GB/s")
    bench.check("sum of the bare link", 100 * sum(rates) / bare, "%", at_least=98)
    for name, rate in zip(("one", "two"), rates, strict=True):
        bench.check(f"{name}, of half", 100 * rate / (sum(rates) / 2), "%", 97, 103)


class Drain(threading.Thread):
    """Drains a manager of its own on a stream of its own, without kernels."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.run_of = run
        self.ended = threading.Event()
        self.ready = threading.Event()
        self.failure = ""
        self.rate = 0.0

    def run(self) -> None:
        try:
            drain(self.run_of, self.ready.set, self.ended.is_set, self.note)
        except Exception as error:  # told by the case
            self.failure = f"{type(error).__name__}: {error}"
            self.ready.set()

    def note(self, rate: float) -> None:
        self.rate = rate


def drain(run: Run, ready, ended, note) -> None:
    """Acquires and releases, pass by pass, and notes the rate of it in the end."""
    consumer = Consumer(run)
    cuda = consumer.torch.cuda
    side = cuda.Stream()
    stream = side.cuda_stream
    marks, layers, began = [], 0, time.monotonic()
    ready()
    while not ended():
        for at, layer in enumerate(consumer.layers):
            consumer.manager.acquire(layer.index, stream)
            consumer.manager.release(layer.index, stream)
            layers += 1
            if at % AHEAD == 0:
                marks.append(cuda.Event())
                marks[-1].record(side)
                if len(marks) > 3:
                    marks.pop(0).synchronize()
    side.synchronize()
    share = layers / len(consumer.layers)
    note(consumer.answer["streamed_bytes"] * share / (time.monotonic() - began))
    consumer.manager.close()


def drain_as_peer(line: Line, run: Run) -> float:
    rates: list[float] = []
    drain(run, lambda: line.put("ready"), line.asked, rates.append)
    return rates[0]


def kernels_beside_copies(bench: Bench) -> None:
    import torch

    _, run = big(bench)
    warm()
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    source = torch.randint(0, 100, (2 * GIB,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def median_ms(work, count: int) -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.current_stream().synchronize()
        spans = [one.elapsed_time(two) for one, two in zip(events, events[1:], strict=False)]
        return statistics.median(spans[count // 10 :])

    def both() -> tuple[float, float]:
        gemm = median_ms(lambda: torch.mm(left, right, out=out), 800)
        return gemm, median_ms(lambda: torch.add(source, 1, out=target), 800)

    both()
    alone = both()
    bench.say(f"alone: GEMM {alone[0]:.3f} ms, memory-bound {alone[1]:.3f} ms")
    run.name = "thread"
    thread = Drain(run)
    thread.start()
    thread.ready.wait(60)
    time.sleep(0.5)
    beside = both()
    thread.ended.set()
    thread.join(30)
    if thread.failure:
        raise RuntimeError(f"the manager beside: {thread.failure}")
    bench.say(f"beside copies at {thread.rate / 1e9:.1f} GB/s: {beside[0]:.3f}, {beside[1]:.3f} ms")
    again = both()
    run.name = "process"
    peer = bench.peer(drain_as_peer, run, name="process")
    peer.get(60)
    time.sleep(0.5)
    other = both()
    peer.put("end")
    rate = peer.get(30)
    base = [statistics.median(pair) for pair in zip(alone, again, strict=True)]
    bench.result.notes["ms"] = {"alone": alone, "beside": beside, "again": again, "other": other}
    bench.check("copies beside", thread.rate / 1e9, "GB/s", at_least=40)
    bench.check("GEMM", beside[0] / base[0], "x", at_most=1.04)
    bench.check("memory-bound", beside[1] / base[1], "x", at_most=1.01)
    bench.check("copies, manager in another process", rate / 1e9, "GB/s")
    bench.check("GEMM, manager in another process", other[0] / base[0], "x")
    bench.check("memory-bound, manager in another process", other[1] / base[1], "x")


def load(bench: Bench) -> None:
    import flextensord

    warm()
    tensors = model.linears()
    path = bench.checkpoint(tensors, SEED, keep="linears")
    total = sum(tensor.bytes for tensor in tensors)
    daemon = bench.daemon("--load-threads", str(threads()))
    client = flextensord.Client(runtime_dir=str(daemon.runtime_dir))
    rates: dict[str, list[float]] = {"reference": [], "hashed": [], "vouched": []}
    for number in range(3):
        reference = link.Reference(pathlib.Path(path), bench.shm, threads())
        rates["reference"].append(total / reference.seconds)
        bench.say(f"reference: {reference.text()}")
        for kind in ("hashed", "vouched"):
            began = time.monotonic()
            client.load(str(path), kind, content_id=None if kind == "hashed" else str(number))
            rates[kind].append(total / (time.monotonic() - began))
            bench.say(f"{kind}: {rates[kind][-1] / GIB:.2f} GiB/s")
            client.drop_weights(kind)
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    bench.result.notes["rates"] = rates
    bench.check("reference", medians["reference"] / GIB, "GiB/s")
    bench.check("checkpoint to pinned", medians["hashed"] / GIB, "GiB/s")
    share = 100 * medians["hashed"] / medians["reference"]
    bench.check("of the reference", share, "%", at_least=80)
    vouched = 100 * medians["vouched"] / medians["reference"]
    bench.check("of the reference, content vouched for", vouched, "%")
    pinnings = daemon.pinnings()
    bench.result.notes["pinnings"] = pinnings
    pinned = [size / seconds / GIB for size, seconds in pinnings if size > GIB and seconds > 0]
    bench.check("registrations in the log", len(pinned), at_least=6)
    if pinned:
        bench.check("registration", statistics.median(pinned), "GiB/s", at_least=20)
