"""`pytest -m pretrained`: `minigpt parity` for each official model that is in the local cache or in weights/."""

from __future__ import annotations

import warnings

import pytest
from conftest import DEVICES

from minigpt import ModelNotFoundError
from minigpt.files.hub import ALIASES
from minigpt.files.locate import locate
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


def judge(checks: list[Check], group: str) -> None:
    """Fails if one check of the group does, skips if all were skipped, else warns of those that were."""
    found = [check for check in checks if check.group == group]
    failed = [
        f"{check.name}: {check.difference} > {check.tolerance}, {check.detail}"
        for check in found
        if check.passed is False
    ]
    assert not failed, "\n".join(failed)
    assert found
    skipped = "; ".join(f"{check.name}: {check.detail}" for check in found if check.passed is None)
    if not any(check.passed for check in found):
        pytest.skip(skipped)
    if skipped:
        warnings.warn(f"skipped: {skipped}", stacklevel=2)
