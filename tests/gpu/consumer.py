"""A client that computes: it acquires layers on a stream, has something read their bytes there,
and releases them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import model
from checkpoint import Pattern, Tensor
from peer import Line

LayerNames = list[tuple[str, list[str]]]


@dataclass
class Run:
    """What a consumer opens and registers."""

    runtime_dir: str
    weights: str
    seed: int
    tensors: list[Tensor]
    layers: LayerNames
    budget: int | None = None
    fraction: float | None = None
    name: str = ""
    patience: float | None = None


@dataclass
class Layer:
    """A layer as it is acquired, with its tensors where they lie."""

    index: int
    name: str
    tensors: list[Tensor]
    views: list = field(default_factory=list)
    streamed: bool = False
    # the first byte: what a tiny kernel reads
    head: Any = None


def address_and_bytes(place: dict):
    """The bytes of a tensor as torch's uint8."""
    if place["bytes"] == 0:
        import torch

        return torch.empty(0, dtype=torch.uint8, device="cuda")
    return model.view(place["address"], "U8", (place["bytes"],))


def warm() -> None:
    """Makes the CUDA context and loads the kernels that consumers use."""
    import torch

    one = torch.arange(64, dtype=torch.uint8, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    total.add_((one.view(torch.int64) != one.view(torch.int64)).sum())
    total.add_((one != one).sum())
    total.add_(1)
    torch.cuda.synchronize()


class Consumer:
    """An open manager with its layers."""

    def __init__(self, run: Run) -> None:
        import flextensord
        import torch

        self.torch = torch
        self.run = run
        warm()
        self.pattern = Pattern(run.seed)
        # words that were wrong, and layers that were compared, counted on the GPU
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self.compared = torch.zeros((), dtype=torch.int64, device="cuda")
        self.free_before = torch.cuda.mem_get_info()[0]
        self.client = flextensord.Client(runtime_dir=run.runtime_dir, patience=run.patience)
        self.manager = self.client.open_manager(run.name)
        self.answer = self.manager.register(
            run.weights, run.layers, budget_bytes=run.budget, memory_fraction=run.fraction
        )
        self.places = {place["name"]: place for place in self.manager.tensors()}
        known = {tensor.name: tensor for tensor in run.tensors}
        self.layers = [
            Layer(
                index=self.manager.layer(name),
                name=name,
                tensors=[known[each] for each in names],
                views=[address_and_bytes(self.places[each]) for each in names],
                streamed=any(self.places[each]["streamed"] for each in names),
            )
            for name, names in run.layers
        ]
        for layer in self.layers:
            layer.head = layer.views[0][0] if layer.tensors[0].bytes else None

    def stream(self) -> int:
        return self.torch.cuda.current_stream().cuda_stream

    def verify(self, layer: Layer) -> None:
        """Queues the comparison of every byte of a held layer."""
        for tensor, view in zip(layer.tensors, layer.views, strict=True):
            self.pattern.add_differences(tensor, view, self.bad)
        self.compared.add_(1)

    def touch(self, layer: Layer) -> None:
        """Queues a tiny kernel that reads the beginning of a held layer."""
        self.bad.add_(layer.head, alpha=0)

    def step(self, layer: Layer, work: Callable[[Layer], None]) -> None:
        """Acquires a layer on the current stream, queues `work`, releases it."""
        stream = self.stream()
        self.manager.acquire(layer.index, stream)
        work(layer)
        self.manager.release(layer.index, stream)

    def steps(self, layers: Iterable[Layer], work: Callable[[Layer], None]) -> None:
        for layer in layers:
            self.step(layer, work)

    def timed_pass(self) -> tuple[float, float]:
        """A pass in order with all bytes compared: when it began and ended."""
        began = time.monotonic()
        self.steps(self.layers, self.verify)
        self.torch.cuda.synchronize()
        return began, time.monotonic()

    def captured_pass(self):
        """The graph of a pass in order with all bytes compared, after an eager one."""
        cuda = self.torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            self.steps(self.layers, self.verify)
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=side):
            self.steps(self.layers, self.verify)
        cuda.synchronize()
        return graph

    def found(self) -> dict:
        """Waits for all that is queued, and says what was compared and what was wrong."""
        self.torch.cuda.synchronize()
        return {
            "bad": int(self.bad.item()),
            "compared": int(self.compared.item()),
            "answer": self.answer,
        }

    def close(self) -> None:
        self.torch.cuda.synchronize()
        self.manager.close()


def orders(layers: list[Layer], seed: int, rounds: int) -> Iterable[tuple[str, list[Layer]]]:
    """Passes that keep to the order of the plan, and passes that do not."""
    chance = random.Random(seed)
    for _ in range(rounds):
        yield "in order", list(layers)
        shuffled = list(layers)
        chance.shuffle(shuffled)
        yield "random", shuffled
        yield "reversed", layers[::-1]
        yield "skips", [layer for layer in layers if chance.random() < 0.5]
        yield "repeats", [layer for layer in layers for _ in range(chance.randint(1, 3))]
        yield "one again and again", [chance.choice(layers)] * 5


def consume(line: Line | None, run: Run, rounds: int) -> dict:
    """Compares all bytes in all those orders; a peer first waits to be told to begin."""
    consumer = Consumer(run)
    if line is not None:
        line.put("ready")
        line.get()
    count = 0
    for _, order in orders(consumer.layers, run.seed, rounds):
        consumer.steps(order, consumer.verify)
        count += len(order)
    found = consumer.found() | {"expected": count}
    consumer.close()
    return found


def consume_until_told(line: Line, run: Run) -> dict:
    """Passes in order, all bytes compared, until the case says something; when each began and
    ended, by the clock that all processes share."""
    consumer = Consumer(run)
    consumer.timed_pass()
    line.put(consumer.answer)
    passes = []
    while not line.asked():
        passes.append(consumer.timed_pass())
    found = consumer.found() | {"passes": passes}
    consumer.close()
    return found
