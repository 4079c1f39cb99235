"""usable_cpus: the limits of the process's own cgroup and of those above it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minigpt.network import device
from minigpt.network.device import cpu_limits, usable_cpus

# /proc/self/cgroup, the files of limits below /sys/fs/cgroup, and the limits found
GROUPS: dict[str, tuple[str, dict[str, str], list[int]]] = {
    "2, the root of a container": ("0::/", {"cpu.max": "150000 100000"}, [1]),
    "2, no limit": ("0::/", {"cpu.max": "max 100000"}, []),
    "2, less than one": ("0::/", {"cpu.max": "50000 100000"}, [0]),
    "2, a unit of systemd": ("0::/system.slice/x.service", {"system.slice/x.service/cpu.max": "200000 100000"}, [2]),
    "2, the slice above": (
        "0::/a.slice/b.scope",
        {"a.slice/cpu.max": "300000 100000", "a.slice/b.scope/cpu.max": "max 100000"},
        [3],
    ),
    "2, both": ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}, [2, 4]),
    "2, seen as the root": ("0::/docker/123", {"cpu.max": "200000 100000"}, [2]),
    "2, beside 1": ("1:name=systemd:/\n0::/a", {"unified/a/cpu.max": "200000 100000"}, [2]),
    "1": (
        "4:cpu,cpuacct:/docker/1\n3:cpuset:/",
        {
            "cpu,cpuacct/docker/1/cpu.cfs_quota_us": "250000",
            "cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000",
        },
        [2],
    ),
    "1, under its short name": (
        "4:cpuacct,cpu:/x",
        {"cpu/x/cpu.cfs_quota_us": "500000", "cpu/x/cpu.cfs_period_us": "100000"},
        [5],
    ),
    "1, no limit": ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
    "1, of other controllers": ("4:memory:/x", {"memory/x/cpu.max": "100000 100000"}, []),
    "damaged": ("nonsense\n0::/", {"cpu.max": "many"}, []),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_limits_of_the_processs_own_groups(name: str, tmp_path: Path) -> None:
    own, files, limits = GROUPS[name]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own + "\n")
    for path, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert sorted(set(cpu_limits(tmp_path))) == limits


def test_no_groups_no_limits(tmp_path: Path) -> None:
    assert list(cpu_limits(tmp_path)) == []


def test_the_smallest_counts_and_one_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    for limits, cpus in (([], threads), ([threads + 7], threads), ([0], 1), ([3, 0, 2], 1)):
        monkeypatch.setattr(device, "cpu_limits", lambda limits=limits: iter(limits))
        assert usable_cpus() == cpus
