"""Capturing a step's work once, to start it later by a single call."""

from collections.abc import Callable

import torch

# Runs the function and returns its result with what runs it anew: the new result lies where the first one did.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]

WARM_UPS = 3


def cuda_capture(device: torch.device) -> Capture:
    """All graphs share a pool of memory: they never run together, and a result is read before the next one starts."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # libraries choose and compile their kernels on the first calls
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = run()
        return result, graph.replay

    return capture
