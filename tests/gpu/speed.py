"""The figures, medians, each against the link's own figure of the same run.

- `streaming`: passes over the Linears of the 13 GiB model, a tiny kernel a part; time between
  events at the ends of passes, against copies of one pinned buffer of 1 GiB before and after.
- `two_managers`: the same by two processes at once.
- `hand_over`: parts that lie at one address. A kernel on a second stream sees the last bytes of
  a part arrive, a kernel behind the acquire says when it starts, both by the GPU's clock.
- `cost_of_a_part`: parts of 256 KiB at addresses of their own, all full: acquires and releases
  of a pass, by the host's clock when queued, beside what the driver takes for the same from
  ctypes, and by events when replayed from a graph.
- `kernels_beside_copies`: a large GEMM and a memory-bound kernel, alone and while a thread of
  the process drains a second manager on another stream, without kernels of its own; for
  information, the same with that manager in another process.
- `attach`: from connecting to the first bytes read, the CUDA context made.
- `load`: a checkpoint in memory to sealed and pinned, in turns with a parallel read into fresh
  shared memory that is then registered; registration from the daemon's log.
- `idle_daemon`: processor time of the daemon while four managers that have streamed do nothing.
"""

from __future__ import annotations

import latency
import throughput
from bench import Suite

SUITE = Suite()
SUITE.case(limit=120)(throughput.streaming)
SUITE.case(limit=120)(throughput.two_managers)
SUITE.case(limit=60)(latency.hand_over)
SUITE.case(limit=60)(latency.cost_of_a_part)
SUITE.case(limit=120)(throughput.kernels_beside_copies)
SUITE.case(limit=90)(latency.attach)
SUITE.case(limit=150)(throughput.load)
SUITE.case(limit=60)(latency.idle_daemon)
