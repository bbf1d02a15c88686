"""What the link itself can do, and what a loader without a daemon can."""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import pathlib
import statistics
import time

from machine import GIB, MIB


def bare_rate(size: int = GIB, copies: int = 6, rounds: int = 5) -> float:
    """Bytes a second of back-to-back copies of one large pinned buffer to the GPU: the median."""
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.fill_(7)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    rates = []
    with torch.cuda.stream(stream):
        target.copy_(host, non_blocking=True)
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(copies):
                target.copy_(host, non_blocking=True)
            end.record()
            end.synchronize()
            rates.append(size * copies / (begin.elapsed_time(end) / 1e3))
    del host, target
    torch.cuda.empty_cache()
    return statistics.median(rates)


def checked(answer):
    """The values of a driver call, or its error."""
    code, *values = answer
    if int(code):
        raise RuntimeError(f"CUDA driver: error {int(code)} ({code})")
    return values[0] if len(values) == 1 else tuple(values)


class Reference:
    """A checkpoint read in parallel into fresh shared memory that is then registered: what a
    program without a daemon would do, with as many threads."""

    def __init__(self, checkpoint: pathlib.Path, shm: pathlib.Path, threads: int) -> None:
        from cuda.bindings import driver

        size = checkpoint.stat().st_size
        path = shm / "reference"
        began = time.monotonic()
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        source = os.open(checkpoint, os.O_RDONLY)
        try:
            os.posix_fallocate(target, 0, size)
            allocated = time.monotonic()
            area = mmap.mmap(target, size)
            anchor = ctypes.c_char.from_buffer(area)
            view = memoryview(area)

            def read(offset: int) -> None:
                end = min(offset + 16 * MIB, size)
                while offset < end:
                    offset += os.preadv(source, [view[offset:end]], offset)

            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(read, range(0, size, 16 * MIB)):
                    pass
            filled = time.monotonic()
            address = ctypes.addressof(anchor)
            checked(driver.cuMemHostRegister(address, size, driver.CU_MEMHOSTREGISTER_PORTABLE))
            registered = time.monotonic()
            checked(driver.cuMemHostUnregister(address))
        finally:
            os.close(source)
            os.close(target)
            path.unlink()
        view.release()
        del anchor
        area.close()
        self.bytes = size
        self.allocate_s = allocated - began
        self.read_s = filled - allocated
        self.register_s = registered - filled
        self.seconds = registered - began

    def text(self) -> str:
        return (
            f"{self.bytes / GIB / self.seconds:.2f} GiB/s: allocate {self.allocate_s:.2f} s, read "
            f"{self.read_s:.2f} s, register {self.register_s:.2f} s"
        )
