"""Tensors of a simulated CUDA device (see simulated_cuda.py): they say cuda:N and hold real values on the CPU."""

from __future__ import annotations

import collections
import functools
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "multinomial"}
CAST = {Tensor.__float__: float, Tensor.__int__: int, Tensor.__bool__: bool, Tensor.__index__: int}
here = threading.local()  # capture, stream, device: of each thread


class Memory:
    """What a tensor and its views share; gone with the last of them."""


class Simulated(Tensor):
    """`inner` on the CPU has the values; the tensor itself has none."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, device: Any, memory: Memory | None = None) -> Any:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            dtype=inner.dtype,
            device=device,
            storage_offset=inner.storage_offset(),
        )
        made.inner, made.memory = inner, memory or Memory()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{plain(self)} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Device:
    """What has happened since `clear`, and how the device is."""

    def __init__(self) -> None:
        self.counts, self.plans = collections.Counter[str](), set[tuple[int, ...]]()
        self.log, self.graphs = list[str](), list[Any]()  # log: the same, by name
        self.free, self.capability = 1 << 34, (9, 0)
        self.replay_disturbs = False  # as before PyTorch 2.13: a replay fails while another thread captures
        self.arriving: list[tuple[Tensor, Tensor]] = []  # copies to the host under way
        self.pinned, self.lock = set[int](), threading.RLock()  # addresses of storages

    def note(self, kind: str, name: str = "") -> None:
        self.counts[kind] += 1
        self.log.append(f"{kind} {name}")

    def clear(self) -> None:
        for kept in (self.counts, self.log, self.plans):
            kept.clear()  # type: ignore[attr-defined]

    def wait(self, name: str) -> None:
        """The host waits for all that is under way."""
        self.note("sync", name)
        refuse(name)
        with self.lock:  # another thread may be waiting, too
            for target, values in self.arriving:
                target.copy_(values)
            self.arriving.clear()


cuda = Device()


def place(device: Any) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")
    return torch.device("cuda", getattr(here, "device", 0)) if str(device) == "cuda" else device


def plain(value: Any) -> Any:
    return value.inner if isinstance(value, Simulated) else value


def refuse(what: str) -> None:
    graph: Any = getattr(here, "capture", None)
    if graph is not None:
        graph.broken = what
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


@functools.cache
def composite(func: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    kept = ("scaled_dot_product_attention", "dropout", "_to_copy")
    return has(func.name(), "CompositeImplicitAutograd") and func._schema.name.split("::")[1] not in kept


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator of aten."""
    with torch.inference_mode(False), torch.no_grad():
        name = func._schema.name.split("::")[1]
        if name in ("linear", "matmul") and args[0].dim() == 1:  # PyTorch uses squeeze_, which no wrapper can follow
            return aten.select.int(run(func, (aten.unsqueeze.default(args[0], 0), *args[1:]), kwargs), 0, 0)
        if composite(func):
            with Operators():
                done = func.decompose(*args, **kwargs)
            if done is not NotImplemented:
                return done
        if name == "_to_copy":
            return copied(args[0], None, kwargs)
        if name == "copy_":
            return copied(args[1], args[0], {"non_blocking": (*args, False)[2], **kwargs})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, Simulated)]
        device = place(kwargs["device"]) if kwargs.get("device") else ours[0].device if ours else place("cpu")
        if device.type == "cpu":
            return func(*args, **kwargs)
        if ours:
            check(name, tensors, {tensor.device for tensor in ours})
        return computed(func, name, args, kwargs, ours, device)


def check(name: str, tensors: list[Any], devices: set[torch.device]) -> None:
    """Whether CUDA takes these operands, and whether the host waits."""
    for tensor in tensors:
        if not isinstance(tensor, Simulated) and name in ("index", "index_put_"):
            cuda.wait(f"{name}: from the host")
        elif not isinstance(tensor, Simulated) and tensor.dim():
            devices.add(tensor.device)
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} in {name}")
    if torch.are_deterministic_algorithms_enabled():
        if name == "cumsum":
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        if name == "index_put_":
            cuda.wait("index_put_, deterministic")
    if name in WAITS:
        cuda.wait(name)


def computed(func: Any, name: str, args: Any, kwargs: Any, ours: list[Any], device: Any) -> Any:
    """The operator's result; where a graph is captured, the operator is recorded."""
    if name == "scaled_dot_product_attention" and args[0].element_size() == 2:
        cuda.plans.add((*args[0].shape, args[1].shape[2]))
    inputs, options = tree_map(plain, args), tree_map(plain, kwargs)
    options.update(
        {"device": "cpu"} if "device" in options else {}, **{"pin_memory": False} if "pin_memory" in options else {}
    )

    def again() -> Any:
        return func(*inputs, **options)

    result = again()
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not leaves and name != "index_put_":
        return result
    known = {tensor.inner.untyped_storage().data_ptr(): tensor.memory for tensor in ours if tensor.numel()}
    memories = {id(leaf): known.get(leaf.untyped_storage().data_ptr()) for leaf in leaves}
    writes = name.endswith("_") or "out" in kwargs
    if writes or not all(memories.values()):
        record(name, again, ours, leaves, memories)
    if writes:
        return kwargs.get("out", args[0])
    return tree_map(lambda x: Simulated(x, device, memories[id(x)]) if isinstance(x, Tensor) else x, result)


def record(
    name: str, again: Callable[[], Any], ours: list[Any], leaves: list[Tensor], memories: dict[int, Any]
) -> None:
    """A kernel: counted, or a node of the graph that is being captured."""
    memories.update({at: Memory() for at, memory in memories.items() if memory is None})
    graph: Any = getattr(here, "capture", None)
    if graph is None:
        return None if "empty" in name else cuda.note("kernel", name)

    def step() -> None:
        for target, new in zip(leaves, (x for x in tree_leaves(again()) if isinstance(x, Tensor)), strict=False):
            if target.data_ptr() != new.data_ptr():
                target.copy_(new)

    mine = {id(tensor.memory) for tensor in ours}
    graph.own.update(memory for memory in memories.values() if id(memory) not in mine)
    graph.outside.update((id(t.memory), (weakref.ref(t.memory), f"{name} {list(t.shape)}")) for t in ours)
    if "empty" not in name:
        graph.steps.append(step)
        graph.nodes.append(name)


def copied(source: Any, into: Any, options: dict[str, Any]) -> Any:
    """Between devices, or host and device; the host goes on at once only where its memory is pinned."""
    target = into.device if into is not None else place(options.get("device") or source.device)
    inner, goal = plain(source), plain(into)
    kinds = {key: value for key, value in options.items() if key in ("dtype", "memory_format")}

    def again() -> Tensor:
        return goal.copy_(inner) if goal is not None else aten._to_copy.default(inner, **kinds).clone()

    if target.type == source.device.type:
        result = again()
        memories: dict[int, Any] = {id(result): into.memory if isinstance(into, Simulated) else None}
        if target.type == "cuda":
            record("copy", again, [t for t in (source, into) if t is not None], [result], memories)
    else:
        cuda.note("copy", target.type)
        refuse("a copy between host and device")
        host = goal if target.type == "cpu" else source
        if options.get("non_blocking") and host is not None and host.untyped_storage().data_ptr() in cuda.pinned:
            if target.type == "cpu":
                goal.fill_(-1)
                with cuda.lock:
                    cuda.arriving.append((goal, inner.clone()))
                return goal
        elif target.type == "cpu" or into is None or source.dim():
            cuda.wait(f"copy: to {target.type}")
        result, memories = again(), {}
    return (
        into
        if into is not None
        else Simulated(result, target, memories.get(id(result)))
        if target.type == "cuda"
        else result
    )


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """What Python does before it reaches an operator: "cuda" is the current device; indices; values; generators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, first = dict(kwargs or {}), args[0] if args else None
        if isinstance(first, (Simulated, Tensor)) and func is Tensor.copy_:
            return run(aten.copy_.default, args, options)
        if isinstance(first, Simulated) and func in (Tensor.item, Tensor.tolist, *CAST):
            cuda.wait(func.__name__)
            return first.inner.tolist() if func is Tensor.tolist else CAST.get(func, lambda x: x)(first.inner.item())
        if isinstance(first, Simulated) and func is Tensor.data_ptr:
            return first.inner.data_ptr()
        if isinstance(first, Tensor) and func in (Tensor.__getitem__, Tensor.__setitem__):
            return self.indexed(func, first, *args[1:])
        given = options.get("generator")
        if given is not None:
            wanted = first.device if isinstance(first, Tensor) else place(options.get("device") or "cpu")
            if getattr(given, "place", torch.device("cpu")) != wanted:
                raise RuntimeError(f"Expected a {wanted} generator in {func.__name__}")
            if wanted.type == "cuda":
                refuse("a generator that the graph does not know")
        moved = [
            place(a) if isinstance(a, torch.device) or (isinstance(a, str) and a[:4] == "cuda") else a for a in args
        ]
        if options.get("device") is not None:
            options["device"] = place(options["device"])
        if func is Tensor.cuda:
            return first.to(place("cuda"))  # type: ignore[union-attr]
        target = options.get("device") or torch.device("cpu")
        if func in (torch.tensor, torch.as_tensor) and target.type == "cuda":
            return func(*args, **{**options, "device": "cpu"}).to(target)
        pin = target.type == "cpu" and options.pop("pin_memory", False)
        try:
            result = func(*moved, **options)
        except RuntimeError as error:  # a shortcut of PyTorch's that does not ask the modes
            if "not linked" not in str(error):
                raise
            result = getattr(aten, {"__invert__": "bitwise_not"}.get(func.__name__, func.__name__))(*moved, **options)
        if pin:
            cuda.pinned.add(result.untyped_storage().data_ptr())
        return result

    def indexed(self, func: Any, target: Any, index: Any, value: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((index, value)) if isinstance(leaf, Tensor)]
        if not any(isinstance(leaf, Simulated) for leaf in [target, *leaves]):
            return func(target, index) if func is Tensor.__getitem__ else func(target, index, value)
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, (Tensor, list)) for part in parts):
            part = plain(target)[index]
            view = Simulated(part, target.device, target.memory) if isinstance(target, Simulated) else part
            if func is Tensor.__getitem__:
                return view
            fill = aten.copy_ if isinstance(value, Tensor) else aten.fill_
            run(fill.default if fill is aten.copy_ else fill.Scalar, (view, value), {})
            return None
        name, act = ("index", operator.getitem) if func is Tensor.__getitem__ else ("index_put_", operator.setitem)
        ours = [leaf for leaf in [target, *leaves] if isinstance(leaf, Simulated)]
        check(name, [target, *leaves], {leaf.device for leaf in ours})
        arguments = (target, index) if func is Tensor.__getitem__ else (target, index, value)
        return computed(act, name, arguments, {}, ours, target.device)
