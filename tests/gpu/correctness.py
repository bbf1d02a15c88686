"""Every byte that a consumer reads is the one that the checkpoint holds."""

from __future__ import annotations

import random

import model
from bench import Bench, Suite
from checkpoint import Tensor, flat
from consumer import Consumer, Run, consume, warm
from daemon import Daemon
from machine import GIB, MIB
from peer import Line

SUITE = Suite()


def evenly(count: int, size: int) -> list[Tensor]:
    """Tensors of one size, in the natural order of their names."""
    return [flat(f"layers.{index}.weight", size) for index in range(count)]


def load(bench: Bench, daemon: Daemon, tensors: list[Tensor], seed: int, **more) -> Run:
    """Loads a checkpoint of those tensors, and says how to run it, a layer a tensor."""
    import flextensord

    path = bench.checkpoint(tensors, seed)
    client = flextensord.Client(runtime_dir=str(daemon.runtime_dir))
    client.load(str(path), f"set-{seed}")
    bench.say(f"{sum(tensor.bytes for tensor in tensors) / MIB:.0f} MiB are loaded")
    layers = model.layers_of(tensors)
    return Run(str(daemon.runtime_dir), f"set-{seed}", seed, tensors, layers, **more)


def judge(bench: Bench, found: dict, what: str = "") -> None:
    """Checks that all was compared and nothing was wrong."""
    suffix = f", {what}" if what else ""
    bench.check(f"wrong words{suffix}", found["bad"], at_least=0, at_most=0)
    if "expected" in found:
        wanted = found["expected"]
        bench.check(f"layers compared{suffix}", found["compared"], "", wanted, wanted)


def compare_all(bench: Bench, run: Run, rounds: int, what: str = "") -> dict:
    """All bytes in all orders, in this process."""
    found = consume(None, run, rounds)
    judge(bench, found, what)
    answer = found["answer"]
    bench.say(
        f"{what or 'all orders'}: {found['compared']} layers, {answer['streamed_bytes'] / MIB:.0f} "
        f"MiB stream through {answer['ring_bytes'] / MIB:.1f} MiB, "
        f"{answer['resident_bytes'] / MIB:.0f} MiB resident"
    )
    return found


@SUITE.case(limit=60)
def a_wrong_byte_is_seen(bench: Bench) -> None:
    """The comparison itself: one changed byte, and one tensor for another, do not pass."""
    tensors = evenly(4, 8 * MIB)
    run = load(bench, bench.daemon(), tensors, 1, budget=GIB)
    consumer = Consumer(run)
    consumer.steps(consumer.layers, consumer.verify)
    bench.check("wrong words", consumer.found()["bad"], at_least=0, at_most=0)
    wrong = consumer.torch.zeros((), dtype=consumer.torch.int64, device="cuda")
    changed = consumer.pattern.expected(tensors[0])
    changed[5 * MIB + 3] ^= 1
    consumer.pattern.add_differences(tensors[0], changed, wrong)
    bench.check("wrong words after one byte changed", wrong.item(), at_least=1, at_most=1)
    wrong.zero_()
    consumer.pattern.add_differences(tensors[1], consumer.layers[0].views[0], wrong)
    bench.check("wrong words of another tensor", wrong.item(), at_least=MIB // 2)
    consumer.close()


@SUITE.case(limit=60)
def all_orders(bench: Bench) -> None:
    run = load(bench, bench.daemon(), evenly(24, 16 * MIB), 2, budget=52 * MIB)
    found = compare_all(bench, run, 8)
    bench.check("streamed", found["answer"]["streamed_bytes"] / MIB, "MiB", at_least=300)


@SUITE.case(limit=60)
def two_streams(bench: Bench) -> None:
    """Layer by layer on one of two streams, by chance: one order all the same."""
    run = load(bench, bench.daemon(), evenly(24, 16 * MIB), 3, budget=52 * MIB)
    consumer = Consumer(run)
    streams = [consumer.torch.cuda.Stream() for _ in range(2)]
    chance = random.Random(3)
    # the totals are added to by both streams, so each has its own
    totals = [consumer.torch.zeros_like(consumer.bad) for _ in streams]
    consumer.torch.cuda.synchronize()
    count = 0
    for turn in range(20):
        order = list(consumer.layers)
        if turn % 2:
            chance.shuffle(order)
        for layer in order:
            at = (count if turn % 4 < 2 else chance.randint(0, 1)) % 2
            consumer.bad = totals[at]
            with consumer.torch.cuda.stream(streams[at]):
                consumer.step(
                    layer,
                    lambda layer: consumer.pattern.add_differences(
                        layer.tensors[0], layer.views[0], consumer.bad
                    ),
                )
            count += 1
    consumer.torch.cuda.synchronize()
    wrong = sum(int(total.item()) for total in totals)
    bench.check("wrong words", wrong, at_least=0, at_most=0)
    bench.check("steps", count, at_least=480)
    consumer.close()


@SUITE.case(limit=60)
def held_together(bench: Bench) -> None:
    """Layers of several parts, nested and two at a time; what would overlap is refused."""
    import flextensord

    tensors = evenly(24, 4 * MIB)
    run = load(bench, bench.daemon(), tensors, 4, budget=36 * MIB)
    names = [tensor.name for tensor in tensors]
    run.layers = [(f"b{at}", names[at : at + 3]) for at in range(0, 24, 3)]
    run.layers += [(name.removesuffix(".weight"), [name]) for name in names]
    consumer = Consumer(run)
    chance = random.Random(4)
    refused = count = 0
    stream = consumer.stream()
    for _ in range(200):
        one, two = chance.choice(consumer.layers), chance.choice(consumer.layers)
        consumer.manager.acquire(one.index, stream)
        try:
            consumer.manager.acquire(two.index, stream)
        except flextensord.FlextensordError as error:
            if error.kind != "HOLD_CONFLICT":
                raise
            refused += 1
        else:
            consumer.verify(two)
            count += 1
            consumer.manager.release(two.index, stream)
        consumer.verify(one)
        count += 1
        consumer.manager.release(one.index, stream)
    judge(bench, consumer.found() | {"expected": count})
    bench.say(f"{refused} of 200 second layers were refused")
    consumer.close()


@SUITE.case(limit=90)
def captured_pass(bench: Bench) -> None:
    """A pass captured once and replayed 100 times, its bytes compared inside; then eager again."""
    run = load(bench, bench.daemon(), evenly(24, 16 * MIB), 5, budget=52 * MIB)
    consumer = Consumer(run)
    graph, cuda = consumer.captured_pass(), consumer.torch.cuda
    bench.say("captured")
    for _ in range(100):
        graph.replay()
    cuda.synchronize()
    bench.say("replayed 100 times")
    consumer.steps(consumer.layers, consumer.verify)
    judge(bench, consumer.found() | {"expected": 24 * 102})
    bench.check("streamed", run_bytes(consumer) / MIB, "MiB", at_least=300)
    consumer.close()


def run_bytes(consumer: Consumer) -> int:
    return consumer.answer["streamed_bytes"]


@SUITE.case(limit=90)
def forward_pass(bench: Bench) -> None:
    """A stack of decoder layers, its modules acquired by hooks, computes the same bits as one
    that lies on the GPU, eager and captured."""
    count = 3
    tensors = model.linears(count) + model.norms(count)
    run = load(bench, bench.daemon(), tensors, 6, budget=340 * MIB)
    consumer = Consumer(run)
    torch = consumer.torch
    resident, streamed = model.stack(count), model.stack(count)
    for tensor in tensors:
        whole = consumer.pattern.expected(tensor).view(torch.bfloat16).view(tensor.shape)
        model.set_parameter(resident, tensor.name, whole)
        place = consumer.places[tensor.name]
        model.set_parameter(
            streamed, tensor.name, model.view(place["address"], "BF16", tensor.shape)
        )
    model.hook(streamed, consumer.manager, {layer.name: layer.index for layer in consumer.layers})
    hidden = torch.randn(64, 1, model.HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = resident(hidden)
        wrong = sum(not torch.equal(streamed(hidden), wanted) for _ in range(10))
        bench.check("passes that differ, eager", wrong, at_least=0, at_most=0)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            streamed(hidden)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            out = streamed(hidden)
        wrong = 0
        for _ in range(10):
            out.zero_()
            graph.replay()
            wrong += not torch.equal(out, wanted)
        bench.check("passes that differ, captured", wrong, at_least=0, at_most=0)
    bench.check("output that is finite", bool(wanted.isfinite().all()), at_least=1)
    bench.check("streamed", run_bytes(consumer) / MIB, "MiB", at_least=700)
    consumer.close()


def at_once(bench: Bench, count: int) -> None:
    """Managers of as many processes, each with its own weight set and order."""
    daemon = bench.daemon()
    peers = []
    for index in range(count):
        tensors = evenly(16 + index, (8 + 4 * index) * MIB)
        run = load(bench, daemon, tensors, 10 + index, budget=(8 + 4 * index) * 3 * MIB + 4 * MIB)
        run.name = f"manager-{index}"
        peers.append(bench.peer(consume, run, 10, name=run.name))
    for peer in peers:
        peer.get(60)
    for peer in peers:
        peer.put("begin")
    for peer in peers:
        judge(bench, peer.get(60), peer.name)


@SUITE.case(limit=90)
def two_managers(bench: Bench) -> None:
    at_once(bench, 2)


@SUITE.case(limit=90)
def four_managers(bench: Bench) -> None:
    at_once(bench, 4)


@SUITE.case(limit=90)
def rings_from_the_least(bench: Bench) -> None:
    """From the least feasible budget upward; under it the model is refused."""
    import flextensord

    sizes = [24, 8, 16, 4, 32, 12, 20, 28]
    tensors = [flat(f"layers.{at}.weight", size * MIB) for at, size in enumerate(sizes * 2)]
    run = load(bench, bench.daemon(), tensors, 20, budget=2 * GIB)
    consumer = Consumer(run)
    least = consumer.answer["least_feasible_bytes"]
    consumer.close()
    run.budget = least - MIB
    try:
        Consumer(run).close()
        bench.result.fail(f"{run.budget} bytes were granted, under the least of {least}")
    except flextensord.FlextensordError as error:
        refused = error.kind == "BUDGET_INFEASIBLE"
        bench.check("refused under the least", refused, at_least=1)
    for share in (1.0, 1.5, 2.0, 4.0):
        run.budget = int(least * share)
        found = compare_all(bench, run, 4, f"{share} of the least")
        held = found["answer"]["resident_bytes"] + found["answer"]["ring_bytes"]
        bench.check(f"held at {share}", held / MIB, "MiB", at_most=run.budget / MIB)


@SUITE.case(limit=90)
def parts_of_all_sizes(bench: Bench) -> None:
    """From 256 B to 512 MiB, all of them streamed, and with the small ones resident."""
    sizes = [256, 264, 1 << 10, 4 << 10, (64 << 10) + 8, 256 << 10, MIB, 16 * MIB]
    sizes += [32 * MIB, 32 * MIB + 256, 128 * MIB, 512 * MIB]
    tensors = [flat(f"layers.{at}.weight", size) for at, size in enumerate(sizes)]
    run = load(bench, bench.daemon(), tensors, 30, budget=2 * GIB)
    consumer = Consumer(run)
    least = consumer.answer["least_feasible_bytes"]
    consumer.close()
    run.budget = least
    found = compare_all(bench, run, 3, "all streamed")
    streamed = found["answer"]["streamed_bytes"]
    bench.check("streamed", streamed / MIB, "MiB", at_least=sum(sizes) / MIB - 1)
    run.budget = least + 8 * MIB
    compare_all(bench, run, 3, "small ones resident")


@SUITE.case(limit=60)
def several_registrations(bench: Bench) -> None:
    """A segment that is pinned in many pieces, with tensors larger than a piece."""
    tensors = [flat(f"layers.{at}.weight", (20 + 17 * at) * MIB + 256 * at) for at in range(8)]
    daemon = bench.daemon("--pin-chunk", "64MiB")
    run = load(bench, daemon, tensors, 40, budget=320 * MIB)
    compare_all(bench, run, 6)
    pinned = sum(each["pinned_bytes"] for each in daemon.status()["weight_sets"])
    bench.check("pinned", pinned / MIB, "MiB", at_least=sum_mib(tensors))


def sum_mib(tensors: list[Tensor]) -> float:
    return sum(tensor.bytes for tensor in tensors) / MIB


def resident(line: Line, run: Run) -> dict:
    """Holds all residents, compares them, and says how much the GPU's free memory fell."""
    consumer = Consumer(run)
    consumer.steps(consumer.layers, consumer.verify)
    consumer.torch.cuda.synchronize()
    fell = consumer.free_before - consumer.torch.cuda.mem_get_info()[0]
    line.put({"fell": fell} | consumer.found())
    line.get()
    consumer.close()
    return {}


@SUITE.case(limit=60)
def shared_residents(bench: Bench) -> None:
    """Residents of a set lie on the GPU once, by the driver's own figure."""
    tensors = evenly(32, 32 * MIB)
    run = load(bench, bench.daemon(), tensors, 50, budget=2 * GIB)
    peers = []
    for index, (low, high) in enumerate([(1024, 1024 + 64), (-64, 64)]):
        run.name = f"manager-{index}"
        peers.append(bench.peer(resident, run, name=run.name))
        found = peers[-1].get(60)
        bench.check(f"memory taken by {run.name}", found["fell"] / MIB, "MiB", low, high)
        bench.check(f"wrong words, {run.name}", found["bad"], at_least=0, at_most=0)
    shared = found["answer"]["resident_bytes_shared"] / MIB
    bench.check("reported as shared", shared, "MiB", at_least=1024)
    for peer in peers:
        peer.put("end")
        peer.get(30)


def write_where_one_may_read(line: Line, run: Run) -> dict:
    """Writes into a held layer with a kernel, and says what came of it."""
    consumer = Consumer(run)
    stream = consumer.stream()
    consumer.manager.acquire(consumer.layers[0].index, stream)
    line.put(consumer.found())
    line.get()
    consumer.layers[0].views[0].add_(1)
    try:
        consumer.torch.cuda.synchronize()
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    return {"error": ""}


@SUITE.case(limit=90)
def a_write_faults_its_writer_only(bench: Bench) -> None:
    daemon = bench.daemon()
    # resident and streamed: the writer's first layer lies in memory that both map
    run = load(bench, daemon, evenly(16, 16 * MIB), 60, budget=GIB)
    run.name = "writer"
    writer = bench.peer(write_where_one_may_read, run, name="writer")
    writer.get(60)
    run.name = "reader"
    reader = bench.peer(consume, run, 60, name="reader")
    reader.get(60)
    streaming = load(bench, daemon, evenly(16, 8 * MIB), 61, budget=28 * MIB)
    streaming.name = "streaming-reader"
    second = bench.peer(consume, streaming, 60, name="streaming-reader")
    second.get(60)
    reader.put("begin")
    second.put("begin")
    writer.put("write")
    error = writer.get(30)["error"]
    bench.say(f"the writer: {error or 'no error'}")
    bench.check("the writer has an error", bool(error), at_least=1)
    for peer in (reader, second):
        judge(bench, peer.get(60), peer.name)
    bench.check("the daemon serves", daemon.status()["phase"] == "serving", at_least=1)
    warm()
