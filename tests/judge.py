"""One verdict over many checks of `parity`, for pytest."""

from __future__ import annotations

import warnings

import pytest

from minigpt.parity.check import Check


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
