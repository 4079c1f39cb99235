"""A CUDA device in software: tensors that say cuda:N, hold real values on the CPU, and refuse what CUDA refuses.

Refused: operands on two devices; a generator of another device; reading or copying to the host during a capture;
replaying a graph whose outside memory was freed. Counted: "kernel", "copy" (between host and device) and "sync" outside
graphs, "capture", "replay". A graph replays the recorded operators on the recorded memory, whatever Python has done
since. A copy to the host that nobody has waited for holds -1s. Not simulated: races between streams, time, the
allocator, what cuBLAS and cuDNN do. `plans`: the shapes that 16-bit fused attention met, as cuDNN plans for each.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from simulated_tensors import Device, Functions, Memory, Operators, cuda, here, place

RealGenerator = torch.Generator
DEFAULT: Any = mock.MagicMock(name="the default stream")


class Graph:
    """torch.cuda.CUDAGraph: the operators of a capture, and the memory outside it that they use, which it keeps not."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.steps, self.nodes, self.broken = list[Callable[[], None]](), list[str](), ""
        self.own, self.outside = set[Memory](), dict[int, tuple[Any, str]]()
        cuda.graphs.append(self)

    def replay(self) -> None:
        cuda.note("replay", f"of {len(self.nodes)} nodes")
        if cuda.replay_disturbs and Capture.running:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        for memory, what in self.outside.values():
            if memory() is None:
                raise RuntimeError(f"the graph uses freed memory: {what}")
        with torch.inference_mode(False), torch.no_grad():
            for step in self.steps:
                step()


class Capture(contextlib.AbstractContextManager[None]):
    """torch.cuda.graph. One at a time; where it fails, the thread's stream stays the graph's, as in PyTorch."""

    running: list[Graph] = []  # noqa: RUF012

    def __init__(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> None:
        self.graph, self.stream, self.mode = graph, stream, capture_error_mode

    def __enter__(self) -> None:
        if Capture.running or self.mode != "thread_local":
            raise RuntimeError("a capture disturbs other threads")
        Capture.running.append(self.graph)
        self.before = here.stream if hasattr(here, "stream") else DEFAULT
        here.capture, here.stream = self.graph, self.stream
        cuda.note("capture")

    def __exit__(self, *error: Any) -> None:
        Capture.running.remove(self.graph)
        here.capture = None
        if self.graph.broken or error[0]:
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {error[1]}")
        here.stream = self.before


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device, self.waited = place(device or "cuda"), list[Any]()

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        cuda.wait("stream")


class Event:
    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        cuda.wait("event")


class Generator(RealGenerator):
    def __new__(cls, device: Any = "cpu") -> Any:
        made: Any = RealGenerator.__new__(RealGenerator if place(device).type == "cpu" else cls)
        if place(device).type == "cuda":
            made.place = place(device)
        return made

    def __init__(self, device: Any = "cpu") -> None: ...

    device = property(lambda self: self.place)  # type: ignore[assignment]


@contextlib.contextmanager
def current(stream: Any = None, device: Any = None) -> Iterator[None]:
    """torch.cuda.stream, torch.cuda.device."""
    before = getattr(here, "stream", DEFAULT), getattr(here, "device", 0)
    device = place(device) if device is not None else getattr(stream, "device", None)
    here.stream, here.device = stream or before[0], before[1] if device is None else device.index
    try:
        yield
    finally:
        here.stream, here.device = before


@contextlib.contextmanager
def simulated(count: int = 2) -> Iterator[Device]:
    """A machine with `count` such devices, in every thread that is started meanwhile."""
    cuda.__init__()  # type: ignore[misc]
    DEFAULT.reset_mock()
    start, keeps = threading.Thread.run, torch.__future__.get_overwrite_module_params_on_conversion()

    def started(thread: threading.Thread) -> None:
        with Functions(), Operators():
            start(thread)

    replaced = dict(
        _lazy_init=lambda: None,
        is_available=lambda: True,
        device_count=lambda: count,
        current_device=lambda: getattr(here, "device", 0),
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: getattr(here, "stream", None) or DEFAULT,
        stream=current,
        device=lambda device: current(device=device),
        CUDAGraph=Graph,
        graph=Capture,
        graph_pool_handle=lambda: (0, 1),
        synchronize=lambda device=None: cuda.wait("device"),
        mem_get_info=lambda device=None: (cuda.free, 1 << 34),
        max_memory_allocated=lambda device=None: 0,
        get_device_name=lambda device=None: "a simulated device",
        get_device_capability=lambda device=None: cuda.capability,
        is_bf16_supported=lambda *args: True,
    )
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._ensureCUDADeviceGuardSet()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(torch.cuda, **replaced))
            stack.enter_context(mock.patch.object(torch, "Generator", Generator))
            stack.enter_context(mock.patch.object(threading.Thread, "run", started))
            stack.enter_context(Functions())
            stack.enter_context(Operators())
            yield cuda
            gc.collect()  # finalizers ask the device
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(keeps)
        torch._C._set_only_lift_cpu_tensors(False)
