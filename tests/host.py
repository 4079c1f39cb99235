"""The defaults of a host program, which no result may depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEFAULTS = ("bfloat16", "meta")


@contextmanager
def default(name: str) -> Iterator[None]:
    """A default dtype, or for "meta" a default device on which tensors hold no numbers."""
    if name == "meta":
        torch.set_default_device(name)
    else:
        torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
