"""What the fuzz tests share: the worker process, and the strategies for damaged JSON and bytes."""

from __future__ import annotations

import copy
import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

WORKER = Path(__file__).with_name("fuzz_worker.py")
PATIENCE = 60  # seconds without an answer: it waits for ever


class Worker:
    """A process that runs cases one by one, and is started anew when one of them kills it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.ends: Counter[str] = Counter()
        self.peak = self.slowest = 0.0

    def run(self, **case: Any) -> str:
        """What came of a case. Fails for a crash, a hang, too much memory, anything written, and any other error."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen([sys.executable, "-X", "faulthandler", str(WORKER)], **pipes)
        process = self.process
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(case).encode() + b"\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(PATIENCE) else b""
        if not line:
            self.process = None
            process.kill()
            code = process.wait()
            pytest.fail(f"the process ended with {code} (-9: it hung and was stopped) on {str(case)[:2000]}")
        answer = json.loads(line)
        self.peak, self.slowest = max(self.peak, answer["peak_mib"]), max(self.slowest, answer["seconds"])
        self.ends[answer["end"].split(":")[0]] += 1
        if answer["peak_mib"] > 1024:
            self.close()  # peaks do not go down: the next case should not be blamed
        assert not answer["fault"], f"{answer['fault']}\n{str(case)[:2000]}"
        assert answer["peak_mib"] < 1024 and not answer["seen"], (answer, str(case)[:2000])
        return str(answer["end"])

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None
        print(f"{sum(self.ends.values())} cases {dict(self.ends)}: {self.slowest:.1f} s, {self.peak:.0f} MiB at most")


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], cases: int) -> None:
    """`check` for that many examples, the same ones each time."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings(max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)(
        given(strategy)(check)
    )()


# Values that JSON can say. RAW marks text to be put into the file as it is.
RAW = "@raw:"
DEEP = {str(depth): RAW + "[" * depth + "]" * depth for depth in (50, 400, 900, 5000, 200_000)}
EDGES = (
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    255,
    2**15,
    2**15 + 1,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63),
    10**400,
)
odd_scalars = st.sampled_from(
    [
        None,
        True,
        False,
        1.5,
        1e-45,
        -0.0,
        float("nan"),
        float("inf"),
        float("-inf"),
        *EDGES,
        "",
        "0",
        "gpt2",
        "\ud800",
        "\0",
        "é",
        "Ġ",
        "<|endoftext|>",
        "x" * 5000,
        [],
        {},
        [[]],
        [0],
        [1, 2],
        {"a": 1},
        {"content": "\udfff"},
        RAW + "1e400",
        RAW + "-0",
        RAW + "1e5",
        RAW + "9" * 5000,
        RAW + '{"a":1,"a":2}',
        *DEEP.values(),
        RAW + '{"a":' * 900 + "1" + "}" * 900,
    ]
)
odd_values = (
    odd_scalars | st.lists(odd_scalars, max_size=3) | st.dictionaries(st.text(max_size=3), odd_scalars, max_size=3)
)


def to_json(value: Any) -> bytes:
    """The value as JSON, RAW texts unquoted."""
    text = json.dumps(value)
    if RAW in text:
        texts: list[str] = []

        def collect(item: Any) -> Any:
            if isinstance(item, str) and item.startswith(RAW):
                texts.append(item.removeprefix(RAW))
                return f"{RAW}{len(texts) - 1}@"
            if isinstance(item, list):
                return [collect(child) for child in item]
            return {key: collect(child) for key, child in item.items()} if isinstance(item, dict) else item

        text = json.dumps(collect(value))
        for number, raw in enumerate(texts):
            text = text.replace(f'"{RAW}{number}@"', raw)
    return text.encode()


@st.composite
def edited(draw: st.DrawFn, value: Any, keys: tuple[str, ...] = ()) -> bytes:
    """A JSON value with a few places, at any depth, replaced, removed or added."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        place = value
        while True:
            if not isinstance(place, (dict, list)) or not place:
                break
            key = draw(st.sampled_from([*place, *keys] if isinstance(place, dict) else range(len(place))))
            child = place[key] if isinstance(place, list) else place.get(key)
            if isinstance(child, (dict, list)) and child and draw(st.integers(0, 3)):
                place = child
            elif isinstance(place, dict) and not draw(st.integers(0, 3)):
                place.pop(key, None)
                break
            else:
                place[key] = copy.deepcopy(draw(odd_values))  # the next edit may be inside
                break
    return to_json(value)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes that were cut, changed, doubled, filled up, or written in another encoding."""
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        new = draw(
            st.binary(max_size=8) | st.sampled_from([b"", b"\0" * 100, b"\xff", b'"', b"[", b"\xed\xa0\x80", b"\r\n"])
        )
        data = draw(
            st.sampled_from(
                [
                    data[:start],
                    data[start:],
                    data[:start] + new + data[start:],
                    data[:start] + new + data[end:],
                    data[:end] + data[start:],
                    b"\xef\xbb\xbf" + data,
                    data.decode("latin-1").encode("utf-16"),
                    data[:start] + new + data[start + len(new) :],
                ]
            )
        )
    return data


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a FIFO": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a loop": lambda path: path.symlink_to(path.name),
    "a dead link": lambda path: path.symlink_to("nowhere"),
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a hole of 8 GB": lambda path: (path.touch(), os.truncate(path, 2**33))[0],
    "32 MB of lists": lambda path: path.write_bytes(b"[" + b"[]," * (2**25 // 3) + b"0]") and None,
}
