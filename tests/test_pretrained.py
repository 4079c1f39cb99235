"""`pytest -m pretrained`: `minigpt parity` for each official model that is in the local cache or in weights/."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minigpt import ModelNotFoundError, parity
from minigpt.hub import ALIASES, locate
from minigpt.published import Check

pytestmark = pytest.mark.pretrained


@pytest.fixture(scope="module", params=ALIASES)
def checks(request: pytest.FixtureRequest) -> list[Check]:
    """All checks of one model, in float32; nothing is downloaded."""
    folder: Path
    try:
        folder = locate(request.param, offline=True)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return list(parity.run(folder, device=device))


@pytest.mark.parametrize("group", ["file", "tokenizer", "published", "transformers"])
def test_parity(checks: list[Check], group: str) -> None:
    found = [check for check in checks if check.group == group]
    failed = [
        f"{check.name}: {check.difference} > {check.tolerance}, {check.detail}"
        for check in found
        if check.passed is False
    ]
    assert not failed, "\n".join(failed)
    skipped = [f"{check.name}: {check.detail}" for check in found if check.passed is None]
    if skipped:
        pytest.skip("; ".join(skipped))
    assert found
