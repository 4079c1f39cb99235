"""`pytest -m pretrained`: `minigpt parity` for each official model that is in the local cache or in weights/."""

from __future__ import annotations

import pytest
from conftest import DEVICES
from judge import judge

from minigpt import ModelNotFoundError
from minigpt.files.locate import locate
from minigpt.files.reading import ALIASES
from minigpt.parity import run
from minigpt.parity.check import Check

pytestmark = pytest.mark.pretrained


@pytest.fixture(scope="module", params=[(name, device) for name in ALIASES for device in DEVICES], ids="-".join)
def checks(request: pytest.FixtureRequest) -> list[Check]:
    """All checks of one model in float32, on the CPU and, where there is one, on CUDA; nothing is downloaded."""
    name, device = request.param
    try:
        locate(name, offline=True)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    return list(run.run(name, device=device, offline=True))


@pytest.mark.parametrize("group", ["file", "tokenizer", "published", "transformers"])
def test_parity(checks: list[Check], group: str) -> None:
    judge(checks, group)
