"""Options, order and shared fixtures. No test reaches the network: the hub is a server of our own on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from official import write_official

from minigpt import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(os.environ.get("MINIGPT_GOLDEN", ROOT.parent / "shared" / "golden"))
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# The promises to a user come first: the same numbers as transformers, then the parts, then the programs around them.
ORDER = (
    *("test_demo.py", "parity", "test_generation.py", "test_model.py", "test_sampling.py"),
    *("test_house.py", "network", "decoding", "library", "text", "files", "interpret", "cli", "jobs", "scripts"),
)

# A shell's background jobs ignore SIGINT, and so would the processes that tests send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the models are tiny: a second thread would only wait, above all on a busy machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="the tests marked slow as well")
    parser.addoption("--soak", action="store_true", help="the long versions of test_soak.py and test_signals.py")
    parser.addoption("--fuzz-cases", type=int, default=120, metavar="N", help="damaged files in test_fuzz.py [120]")
    parser.addoption("--plain", action="store_true", help="as where torch lacks the operators of network/products.py")
    parser.addoption("--simulated-cuda", action="store_true", help="CUDA in software (simulated_cuda.py), for -k cuda")
    parser.addoption("--narrow", action="store_true", help="int8 as on a CPU without VNNI: with 7-bit activations")


def pytest_configure(config: pytest.Config) -> None:
    """The products of another machine, where one is asked for."""
    from minigpt.network import formats, products

    if config.getoption("--simulated-cuda") and not torch.cuda.is_available():
        from simulated_cuda import simulated

        device = simulated()
        device.__enter__()
        config.add_cleanup(lambda: device.__exit__(None, None, None))
        DEVICES.append("cuda")
    works = products.works
    if config.getoption("--plain"):
        products.works = lambda product: (
            product.__name__.startswith("Plain") if product.__module__ == formats.__name__ else works(product)
        )
    elif config.getoption("--narrow"):
        products.works = lambda product: product is not formats.Int8 and works(product)
    products.works.cache_clear = works.cache_clear


class Claims:
    """Before each file's dots: where it is, and the first sentence of its docstring, also with -q."""

    def __init__(self, config: pytest.Config) -> None:
        self.writer = config.get_terminal_writer()
        self.last = ""

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        file = nodeid.partition("::")[0]
        if file != self.last:
            first = (ROOT / file).read_text("utf-8").partition("\n")[0] if (ROOT / file).is_file() else ""
            if self.writer.width_of_current_line:
                self.writer.line()
            self.writer.line(f"{file.removeprefix('tests/')}: {first.strip(chr(34))}")
            self.last = file


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if session.config.get_verbosity() <= 0 and (reporter := plugins.get_plugin("terminalreporter")):
        reporter.showfspath = False  # its lines name the file alone
        plugins.register(Claims(session.config))


def rank(item: pytest.Item) -> int:
    """Where its file comes in ORDER; the last, tests/processes, is in none."""
    names = {item.path.name, item.path.parent.name}
    return next((at for at, name in enumerate(ORDER) if name in names), len(ORDER))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by ORDER. Leave the slow tests out, unless --slow, -m slow or a test's own name asks for them."""
    items.sort(key=rank)
    named = "slow" in config.option.markexpr or any("::" in arg for arg in config.args)
    if not config.getoption("--slow") and not named:
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)


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


@pytest.fixture(scope="session")
def gpt2() -> Tokenizer:
    """GPT-2's own tokenizer."""
    return Tokenizer.gpt2()


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with OpenAI's vocab.json and merges.txt."""
    return write_official(tmp_path_factory.mktemp("official"))
