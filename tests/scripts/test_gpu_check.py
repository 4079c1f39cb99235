"""gpu_check.py runs to its end, on the simulated device where there is no GPU, and writes one JSON file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import gpu_check
import pytest
import torch
from simulated_cuda import simulated


@pytest.mark.slow
def test_it_runs_to_its_end(tmp_path: Path) -> None:
    with contextlib.nullcontext() if torch.cuda.is_available() else simulated():
        assert gpu_check.main(["--quick", "--json", str(tmp_path / "gpu.json")]) == 0
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert len(results["lengths"]["seconds"]) == 20 and not results["threads"]["wrong"]
    assert "not finite: ln_f.weight" in results["damaged weights"]
    assert results["equal calls, bfloat16"]["sampled, 32 rows"]["ms a step"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "torch sees no CUDA device here" in capsys.readouterr().err
