"""Seconds: of a hand-over, of a part, of an attach; and what waiting costs the daemon."""

from __future__ import annotations

import ctypes
import functools
import os
import statistics
import time

import model
from bench import Bench
from checkpoint import flat
from consumer import Consumer, Run, warm
from machine import GIB, MIB
from throughput import big

SMALL = 256 << 10


def hand_over(bench: Bench) -> None:
    import flextensord

    from kernels import Kernels

    # with the label in front, one part fills the least piece that a GPU gives of its memory
    size, pieces = 2 * MIB - 256, 32
    tensors = [flat(f"layers.{at}.weight", size) for at in range(8)]
    daemon = bench.daemon()
    client = flextensord.Client(runtime_dir=str(daemon.runtime_dir))
    client.load(str(bench.checkpoint(tensors, 201)), "small")
    layers = model.layers_of(tensors)
    run = Run(str(daemon.runtime_dir), "small", 201, tensors, layers, budget=GIB)
    probe = Consumer(run)
    least = probe.answer["least_feasible_bytes"]
    probe.close()
    run.budget = least
    consumer = Consumer(run)
    addresses = {consumer.places[tensor.name]["address"] for tensor in tensors}
    bench.result.notes["answer"] = consumer.answer
    bench.check("addresses of all parts", len(addresses), at_most=1)
    torch, kernels = consumer.torch, Kernels()
    wanted = [consumer.pattern.expected(tensor) for tensor in tensors]
    reader, watcher = torch.cuda.Stream(), torch.cuda.Stream()
    times = torch.zeros(4, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    kernels.tick(watcher.cuda_stream, times.data_ptr())
    torch.cuda.synchronize()
    bench.check("step of the GPU's clock", int(times[0].item()) / 1e3, "µs", at_most=2)
    gaps, late = [], 0
    held = consumer.layers[0]
    consumer.manager.acquire(held.index, reader.cuda_stream)
    torch.cuda.synchronize()
    for number in range(1, 240):
        at = number % len(tensors)
        times.zero_()
        torch.cuda.synchronize()
        kernels.watch(
            watcher.cuda_stream,
            consumer.places[tensors[at].name]["address"],
            wanted[at].data_ptr(),
            size,
            pieces,
            times.data_ptr(),
        )
        # the watcher runs before the copy can begin
        time.sleep(0.0005)
        consumer.manager.release(held.index, reader.cuda_stream)
        held = consumer.layers[at]
        consumer.manager.acquire(held.index, reader.cuda_stream)
        kernels.stamp(reader.cuda_stream, times.data_ptr() + 16)
        torch.cuda.synchronize()
        arrived, watched, started, _ = times.tolist()
        # a part that was there before would be seen at once
        late += arrived == 0 or arrived - watched < 200_000
        gaps.append((started - arrived) / 1e3)
    consumer.manager.release(held.index, reader.cuda_stream)
    torch.cuda.synchronize()
    gaps.sort()
    bench.result.notes["gaps_us"] = gaps
    bench.check("hand-overs that were not seen", late, at_most=0)
    bench.check("copy done to consumer start", statistics.median(gaps), "µs", at_most=8)
    bench.check("the same, 95th of 100", gaps[len(gaps) * 95 // 100], "µs")
    consumer.close()


def cost_of_a_part(bench: Bench) -> None:
    import flextensord

    count = 64
    tensors = [flat(f"layers.{at}.weight", SMALL) for at in range(count)]
    daemon = bench.daemon()
    client = flextensord.Client(runtime_dir=str(daemon.runtime_dir))
    client.load(str(bench.checkpoint(tensors, 202)), "parts")
    layers = model.layers_of(tensors)
    # one layer of all parts: none of them may lie where another one lies
    together = [("all", [tensor.name for tensor in tensors])]
    run = Run(str(daemon.runtime_dir), "parts", 202, tensors, layers + together, budget=GIB)
    probe = Consumer(run)
    run.budget = probe.answer["least_feasible_bytes"]
    probe.close()
    consumer = Consumer(run)
    bench.result.notes["answer"] = consumer.answer
    parts = [layer for layer in consumer.layers if layer.streamed and len(layer.tensors) == 1]
    bench.check("parts at addresses of their own", len(parts), at_least=count // 2)
    torch = consumer.torch
    acquire, release = consumer.manager.acquire, consumer.manager.release
    side = torch.cuda.Stream()
    stream = side.cuda_stream

    def rest() -> None:
        """Until all parts are full again."""
        torch.cuda.synchronize()
        time.sleep(0.02)

    def queue() -> None:
        for layer in parts:
            acquire(layer.index, stream)
            release(layer.index, stream)

    def graph_us(work) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            work()
        spans = []
        for _ in range(40):
            rest()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end) * 1e3 / len(parts))
        bench.result.notes.setdefault("spans_us", []).append(spans)
        return statistics.median(spans[5:])

    def host_us(work) -> tuple[float, float]:
        """The first pass after a rest, and the next one."""
        spans: list[list[float]] = [[], []]
        for _ in range(40):
            rest()
            for each in spans:
                began = time.perf_counter()
                work()
                each.append((time.perf_counter() - began) * 1e6 / len(parts))
        bench.result.notes.setdefault("host_us", []).append(spans)
        first, then = (statistics.median(each[5:]) for each in spans)
        return first, then

    first, then = host_us(queue)
    bench.check("host, acquire and release", then, "µs", at_most=4)
    bench.check("the same, first pass after a rest", first, "µs")
    first, then = host_us(lambda: batches(torch, stream, len(parts)))
    bench.check("two batches of the driver from ctypes", then, "µs")
    bench.check("the same, first pass after a rest", first, "µs")

    def kernel_alone() -> None:
        for _ in parts:
            consumer.bad.add_(0)

    def kernel_within() -> None:
        for layer in parts:
            acquire(layer.index, stream)
            consumer.bad.add_(0)
            release(layer.index, stream)

    rest()
    pairs = graph_us(queue)
    alone, within = graph_us(kernel_alone), graph_us(kernel_within)
    bench.check("GPU, acquire and release", pairs, "µs", at_most=7)
    bench.check("GPU, a tiny kernel", alone, "µs")
    bench.check("GPU, acquire, a tiny kernel, release", within, "µs")
    consumer.close()


class Step(ctypes.Structure):
    """`CUstreamBatchMemOpParams` of a wait for 32 bits or a write of them."""

    _fields_ = [
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    ]


def batches(torch, stream: int, pairs: int) -> None:
    """What an acquire and a release ask of the driver, on words that nobody else uses."""
    call, four, one, _ = prepared(torch)
    handle = ctypes.c_void_p(stream)
    for _ in range(pairs):
        call(handle, 4, four, 0)
        call(handle, 1, one, 0)


@functools.cache
def prepared(torch):
    call = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    words = torch.ones(16, dtype=torch.int32).pin_memory()
    slot, want = words.data_ptr(), words.data_ptr() + 32
    wait, write, equal = 1, 2, 1
    # the release writes what the next wait looks for
    four = (Step * 4)(
        Step(write, want, 5, 0),
        Step(wait, slot, 1, equal),
        Step(write, slot, 1, 0),
        Step(write, want, 7, 0),
    )
    one = (Step * 1)(Step(write, slot, 1, 0))
    if call(ctypes.c_void_p(0), 4, four, 0) != 0:
        raise RuntimeError("the driver refuses the batches of the reference")
    return call, four, one, words


def attach(bench: Bench) -> None:
    import flextensord
    import torch

    _, run = big(bench)
    warm()
    spans = []
    steps: list[list[float]] = []
    for _ in range(7):
        at = [time.perf_counter()]
        client = flextensord.Client(runtime_dir=run.runtime_dir)
        at.append(time.perf_counter())
        manager = client.open_manager("")
        at.append(time.perf_counter())
        manager.register(run.weights, run.layers, budget_bytes=run.budget)
        at.append(time.perf_counter())
        name, (tensor, *_) = run.layers[0]
        place = next(each for each in manager.tensors() if each["name"] == tensor)
        stream = torch.cuda.current_stream().cuda_stream
        layer = manager.layer(name)
        manager.acquire(layer, stream)
        first = model.view(place["address"], "U8", (place["bytes"],))[:256].sum()
        manager.release(layer, stream)
        first.item()
        at.append(time.perf_counter())
        spans.append((at[-1] - at[0]) * 1e3)
        steps.append([(two - one) * 1e3 for one, two in zip(at, at[1:], strict=False)])
        torch.cuda.synchronize()
        manager.close()
    bench.result.notes["steps_ms"] = steps
    bench.check("connect to first bytes", statistics.median(spans), "ms", at_most=150)
    bench.check("the first time", spans[0], "ms")
    for number, name in enumerate(("connect", "open", "register", "first bytes")):
        bench.check(f"of it: {name}", statistics.median(each[number] for each in steps), "ms")


def idle_daemon(bench: Bench) -> None:
    import flextensord

    tensors = [flat(f"layers.{at}.weight", 16 * MIB) for at in range(24)]
    daemon = bench.daemon()
    client = flextensord.Client(runtime_dir=str(daemon.runtime_dir))
    client.load(str(bench.checkpoint(tensors, 203)), "idle")
    layers = model.layers_of(tensors)
    consumers = []
    for number in range(4):
        run = Run(str(daemon.runtime_dir), "idle", 203, tensors, layers, budget=52 * MIB)
        run.name = f"idle-{number}"
        consumers.append(Consumer(run))
        for _ in range(3):
            consumers[-1].steps(consumers[-1].layers, consumers[-1].verify)
    wrong = sum(consumer.found()["bad"] for consumer in consumers)
    bench.check("wrong words", wrong, at_most=0)
    streamed = min(consumer.answer["streamed_bytes"] for consumer in consumers)
    bench.check("streamed a pass", streamed / MIB, "MiB", at_least=300)
    time.sleep(2)
    before, began = daemon.cpu_seconds(), time.monotonic()
    time.sleep(10)
    used = (daemon.cpu_seconds() - before) / (time.monotonic() - began)
    bench.result.notes["ticks a second"] = os.sysconf("SC_CLK_TCK")
    bench.check("of a core", 100 * used, "%", at_most=0.5)
    for consumer in consumers:
        consumer.close()
