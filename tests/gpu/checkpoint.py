"""Checkpoints whose every byte can be computed again, on the CPU and on the GPU.

The bytes of a tensor are a run of one fixed block of random bytes, read around, that begins at a
place which follows from a seed and the tensor's name. The block's length is eight times a prime,
so that pieces which were swapped, moved or left out do not look like what belongs there. Read as
bf16 the bytes are numbers of 0.008 to 0.03 either side of zero: a model of them computes
something finite.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import pathlib
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

WORDS = 2_097_143
BLOCK = 8 * WORDS
DTYPE_BYTES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for dimension in self.shape:
            size *= dimension
        return size


def flat(name: str, size: int) -> Tensor:
    """A tensor of that many bytes."""
    return Tensor(name, "U8", (size,))


@functools.cache
def block() -> bytes:
    """The block, twice: any run of at most BLOCK bytes lies in it in one piece."""
    data = bytearray(random.Random(20).randbytes(BLOCK))
    signs = bytes(0x3C if value < 128 else 0xBC for value in range(256))
    data[1::2] = data[1::2].translate(signs)
    return bytes(data) * 2


def start(seed: int, name: str) -> int:
    """Where the bytes of a tensor begin in the block."""
    return 8 * (zlib.crc32(f"{seed}/{name}".encode()) % WORDS)


def runs(seed: int, tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """The tensor as runs of the block: offset in the tensor, offset in the block, bytes."""
    begin = start(seed, tensor.name)
    for offset in range(0, tensor.bytes, BLOCK):
        yield offset, (begin + offset) % BLOCK, min(BLOCK, tensor.bytes - offset)


def header(tensors: list[Tensor]) -> bytes:
    """The safetensors header, its length in front."""
    entries = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def threads() -> int:
    return min(16, len(os.sched_getaffinity(0)))


def write(path: pathlib.Path, tensors: list[Tensor], seed: int) -> int:
    """Writes the checkpoint, unless a whole one is there. Returns the bytes of its tensors."""
    total = sum(tensor.bytes for tensor in tensors)
    head = header(tensors)
    if path.exists() and path.stat().st_size == len(head) + total:
        with path.open("rb") as file:
            if file.read(len(head)) == head:
                return total
    unfinished = path.with_suffix(".unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # a full file system is an error here, and not a signal later
        os.posix_fallocate(descriptor, 0, len(head) + total)
        os.pwrite(descriptor, head, 0)
        data = memoryview(block())

        def put(piece: tuple[int, int, int]) -> None:
            at, begin, size = piece
            while size:
                done = os.pwrite(descriptor, data[begin : begin + size], at)
                at, begin, size = at + done, begin + done, size - done

        pieces = []
        at = len(head)
        for tensor in tensors:
            pieces += [(at + offset, begin, size) for offset, begin, size in runs(seed, tensor)]
            at += tensor.bytes
        with concurrent.futures.ThreadPoolExecutor(threads()) as pool:
            for _ in pool.map(put, pieces):
                pass
    finally:
        os.close(descriptor)
    unfinished.rename(path)
    return total


def first_difference(path: pathlib.Path, tensors: list[Tensor], seed: int) -> str | None:
    """Reads the checkpoint back: the first tensor that is not as it should be, and where."""
    data = memoryview(block())
    with path.open("rb") as file:
        if file.read(len(header(tensors))) != header(tensors):
            return "header"
        for tensor in tensors:
            for offset, begin, size in runs(seed, tensor):
                if file.read(size) != data[begin : begin + size]:
                    return f"{tensor.name} behind {offset}"
        return "bytes behind the last tensor" if file.read(1) else None


class Pattern:
    """What tensors hold, on the GPU; its work is queued on torch's current stream."""

    def __init__(self, seed: int) -> None:
        import torch

        self.seed = seed
        self.torch = torch
        host = torch.frombuffer(bytearray(block()), dtype=torch.uint8)
        self.block = host.cuda()

    def expected(self, tensor: Tensor):
        """The tensor's bytes, as a tensor of uint8 of its own."""
        pieces = [self.block[begin : begin + size] for _, begin, size in runs(self.seed, tensor)]
        return self.torch.cat(pieces) if pieces else self.block[:0]

    def add_differences(self, tensor: Tensor, view, total) -> None:
        """Adds to `total` how many words (at the end: bytes) of `view` (uint8) are wrong."""
        for offset, begin, size in runs(self.seed, tensor):
            words = size // 8 * 8
            for low, high, kind in ((0, words, self.torch.int64), (words, size, self.torch.uint8)):
                if low < high:
                    there = view[offset + low : offset + high].view(kind)
                    wanted = self.block[begin + low : begin + high].view(kind)
                    total.add_((there != wanted).sum())
