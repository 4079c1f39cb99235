"""Shared fixtures. No test reaches the network: the hub is a server of our own on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(os.environ.get("MINIGPT_GOLDEN", ROOT.parent / "shared" / "golden"))
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# A shell's background jobs ignore SIGINT, and so would the processes that tests send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the models are tiny: a second thread would only wait, above all on a busy machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="the long versions of test_soak.py and test_signals.py")
    parser.addoption("--fuzz-cases", type=int, default=120, metavar="N", help="damaged files in test_fuzz.py [120]")
    parser.addoption("--plain", action="store_true", help="as with a torch without the operators of minigpt/linear.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--plain"):
        from minigpt.network import products

        works = products.works
        products.works = lambda product: (
            product.__name__.startswith("Plain") if product.__module__ == products.__name__ else works(product)
        )


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether the long versions are wanted."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def fuzz_cases(request: pytest.FixtureRequest) -> int:
    """How many damaged files to try; twice as many prompts."""
    return int(request.config.getoption("--fuzz-cases"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of published facts; the tests that need it skip without it."""
    if not GOLDEN.is_dir():
        pytest.skip("no folder of published numbers: set MINIGPT_GOLDEN")
    return GOLDEN
