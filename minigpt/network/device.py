"""Where a model runs and in what format, and how many CPUs there are for it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from minigpt.errors import DeviceError


def find_device(device: str | torch.device) -> torch.device:
    """The device meant, if it is there; DeviceError where it is not."""
    name = str(device)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise DeviceError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    place = torch.device(name)
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            there = f"this machine has cuda:0 to cuda:{count - 1}" if count else "PyTorch finds no CUDA device"
            raise DeviceError(f"device {name!r} is not there: {there}; use cpu or auto")
    return place


def find_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype meant, if `device` supports it; DeviceError naming the ones that it does otherwise."""
    name, third = str(dtype).removeprefix("torch."), "int8" if device.type == "cpu" else "bfloat16"
    if name not in ("float32", "float16", third):
        raise DeviceError(f"dtype {name!r} is not supported on {device.type}: use float32, float16 or {third}")
    if device.type == "cuda" and name == "float32" and _tf32_enabled():
        warnings.warn(
            "TF32 is enabled (torch.backends.cuda.matmul.allow_tf32, .fp32_precision or set_float32_matmul_precision): "
            "float32 results will differ from the CPU's in the third digit",
            stacklevel=3,
        )
    if name == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
        warnings.warn(f"{device} has no fast bfloat16 arithmetic: float16 is faster there", stacklevel=3)
    found: torch.dtype = getattr(torch, name)
    return found


def _tf32_enabled() -> bool:
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # newer torch refuses the older flag once this one was set
    return bool(matmul.allow_tf32) if precision in (None, "none") else precision == "tf32"


def usable_cpus() -> int:
    """The threads that pay: PyTorch's own choice, but no more than the process's cgroups let run at once."""
    return max(1, min([torch.get_num_threads(), *cpu_limits()]))


def cpu_limits(root: Path = Path("/")) -> Iterator[int]:
    """The CPU limits of the process's own cgroup and of all above it, of cgroup 2 and of cgroup 1."""
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):  # not Linux
        own = []
    mount = root / "sys/fs/cgroup"
    for line in [*own, "0::/", "0:cpu:/"]:  # a container may see its own group as the root, under another name
        controllers, _, group = line.partition(":")[2].partition(":")
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        tops = (mount / "cpu", mount / controllers) if controllers else (mount, mount / "unified")
        for path in (top / group.strip("/") for top in tops if not controllers or "cpu" in controllers.split(",")):
            for folder in (path, *path.parents):
                with suppress(OSError, ValueError, ZeroDivisionError):  # no such file; "max": no limit
                    quota, period = " ".join((folder / name).read_text() for name in names).split()
                    if int(quota) > 0:
                        yield int(quota) // int(period)
