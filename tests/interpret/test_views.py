"""The views of attention: terminal, JSON and page, the last in a real headless Chromium, and the attention command."""

from __future__ import annotations

import base64
import io
import json
import re
import zipfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser, find
from conftest import ROOT
from host import DEFAULTS, default
from torch import Tensor

import minigpt
from minigpt import GPT2, GPT2Config, LanguageModel, MiniGPTError, PromptError, Tokenizer
from minigpt.cli.main import main
from minigpt.interpret import heads, page, terminal
from minigpt.parity import published

TEXT = 'The cat\n\tsat on the mat, caf\u00e9 \U0001f98a </script><b>&amp; the cat\u200b "'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with GPT-2's vocabulary."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny"
    model = GPT2(GPT2Config(n_embd=24, n_head=4, n_layer=3, n_positions=256, initializer_range=0.5))
    minigpt.save(model, path)
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return minigpt.load(folder, device="cpu")


@pytest.fixture
def run(folder: Path, lm: LanguageModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `attention` in this process, on a model that is loaded once: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("minigpt.loading.load", lambda *_, **__: lm)

    def call(*args: str) -> tuple[int, str, str]:
        try:
            code = main(["attention", *args, "-m", str(folder), "--offline", "--device", "cpu"])
        except SystemExit as exit:  # argparse
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# Tokens


def test_labels_show_tokens_exactly() -> None:
    tokenizer = Tokenizer.gpt2()
    assert [terminal.label(tokenizer, id) for id in tokenizer.encode("The cat\n\U0001f98a")] == [
        "'The'",
        "' cat'",
        "'\\n'",
        "b'\\xf0\\x9f'",
        "b'\\xa6'",
        "b'\\x8a'",
    ]
    assert terminal.label(None, 7) == "#7" and terminal.label(tokenizer, 60000) == "#60000"


def test_records_hold_a_token_as_text_and_bytes() -> None:
    """They were Python's spelling of a string or of bytes, which other languages do not read."""
    tokenizer = Tokenizer.gpt2()
    assert terminal.token_record(tokenizer, 464) == {"id": 464, "token": "The", "bytes": [84, 104, 101]}
    half = {"id": 30325, "token": " \ufffd", "bytes": [32, 240, 159, 152]}
    assert terminal.token_record(tokenizer, 30325) == half
    for unknown in ((None, 7), (tokenizer, 60000)):
        assert terminal.token_record(*unknown) == {"id": unknown[1], "token": None, "bytes": None}


def test_pieces_are_text_and_marks_by_turns() -> None:
    tokenizer = Tokenizer.gpt2()

    def pieces(text: str) -> list[list[str]]:
        return [page.pieces(tokenizer, id) for id in tokenizer.encode(text)]

    assert pieces("cat") == [["cat"]]
    assert pieces(" cat") == [["", "␣", "cat"]]
    assert pieces("\n\t") == [["", "⏎"], ["", "⇥"]]
    assert pieces("␣") == [["", "\\xe2"], ["", "\\x90"], ["", "\\xa3"]]  # a typed ␣ is no mark
    assert pieces("\u00a0") == [["", "\\xa0"]] and pieces("\u200b") == [["", "\\u200b"]]  # no plain space, no width
    assert [p for p in pieces("\U0001f98a")] == [["", "\\xf0\\x9f"], ["", "\\xa6"], ["", "\\x8a"]]
    assert page.pieces(None, 7) == ["", "#7"]


# The terminal


def test_default_is_one_line_for_each_head(run: Any, lm: LanguageModel) -> None:
    text = "The cat sat on the mat"
    labels = ["'The'", "' cat'", "' sat'", "' on'", "' the'", "' mat'"]
    weights = lm.attention(text)
    for arguments, layer in (((), 0), (("--layer", "2"), 2)):
        code, out, err = run(text, *arguments)
        lines = out.splitlines()
        assert (code, err, len(lines)) == (0, "", 5)
        assert lines[0] == f"layer {layer}: what the last of 6 tokens, ' mat', attends to"
        for head, line in enumerate(lines[1:]):
            row = weights[layer, head, -1]
            order = row.argsort(descending=True)[:3].tolist()
            assert line.startswith(f"  head {head} ")
            assert line.endswith("  " + ", ".join(f"{labels[at]} {row[at]:.3f}" for at in order))


@pytest.mark.parametrize("colour", [False, True])
def test_default_view_fits_the_screen(lm: LanguageModel, colour: bool) -> None:
    """The strip comes with all the layer's heads or with none, and never pushes the text after it over the edge."""
    text = "The cat sat on the mat"
    weights, labels = lm.attention(text), ["'The'", "' cat'", "' sat'", "' on'", "' the'", "' mat'"]

    def lines(width: int) -> list[str]:
        screen = terminal.Screen(width, colour)
        return [re.sub("\x1b[^m]*m", "", line) for line in terminal.layer_lines(weights, labels, 1, screen)]

    bare = max(map(len, lines(1)[1:]))
    needed = bare + len(labels) + 2
    assert max(map(len, lines(needed))) == needed
    assert all(re.match(r"  head \d   .{6}  '", line) for line in lines(needed)[1:])
    assert lines(needed - 1)[1:] == lines(1)[1:]
    for width, heading in (
        (55, "layer 1: what the last of 6 tokens, ' mat', attends to"),
        (20, "layer 1: what the la"),
    ):
        assert lines(width)[0] == heading and len(heading) <= width


def test_chosen_heads_with_weights_and_matrix(run: Any, lm: LanguageModel) -> None:
    text = "The cat sat on the mat"
    code, out, err = run(text, "--layer", "1", "--head", "0", "3")
    lines = out.splitlines()
    assert (code, err, len(lines)) == (0, "", 16) and "\x1b" not in out
    weights = lm.attention(text)[1]
    labels = ["'The'", "' cat'", "' sat'", "' on'", "' the'", "' mat'"]
    for start, head in ((0, 0), (8, 3)):
        top = int(weights[head, -1].argmax())
        value = weights[head, -1, top]
        heading = f"layer 1 head {head}: ' mat' attends most to {labels[top]} (position {top}), {value:.3f}"
        assert lines[start] == heading
        for at, line in enumerate(lines[start + 2 : start + 8]):
            assert re.match(rf"\s+{at}  {re.escape(labels[at])}\s+{weights[head, -1, at]:.3f}", line)
    one = [line for line in terminal.head_lines(lm.attention(text), labels, 1, 0, terminal.Screen(width=20))]
    assert not re.search("[*#]", "".join(one))  # no room for the matrix


def test_shades_and_colours_follow_the_weight() -> None:
    weights = torch.tensor([[[[1.0, 0, 0], [0.5, 0.5, 0], [0.0, 0.1, 0.9]]]])
    lines = list(terminal.head_lines(weights, ["a", "b", "c"], 0, 0, terminal.Screen()))
    assert [line.split()[-1] for line in lines[2:]] == ["##", "****", "..##"]
    lines = list(terminal.head_lines(weights, ["a", "b", "c"], 0, 0, terminal.Screen(colour=True)))
    assert lines[2].endswith("\x1b[48;5;230m  \x1b[0m")
    assert re.findall(r"48;5;(\d+)m", lines[4]) == ["235", "125", "230"]


def test_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen, pipe = Terminal(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "ascii")
    assert terminal.Screen.of(screen).colour and not terminal.Screen.of(pipe).colour
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.Screen.of(screen).colour


# JSON, roles, ranking, lens


def test_json_holds_every_number(run: Any, lm: LanguageModel) -> None:
    code, out, err = run("The cat sat", "--json", "--ablate", "0.1", "1.2")
    records = [json.loads(line) for line in out.splitlines()]
    weights = lm.attention("The cat sat", ablate=["0.1", "1.2"])
    assert (code, err, len(records)) == (0, "", 12)
    for number, record in enumerate(records):
        assert (record["layer"], record["head"]) == divmod(number, 4)
        assert record["ids"] == [464, 3797, 3332]
        assert record["tokens"] == [terminal.token_record(lm.tokenizer, id) for id in record["ids"]]
        pattern = weights[record["layer"], record["head"]]
        assert torch.equal(torch.tensor(record["weights"]), pattern)
        at = int(pattern[-1].argmax())
        assert record["top"] == {"position": at, **record["tokens"][at], "weight": pattern[-1, at].item()}
    assert len(run("The cat sat", "--json", "--layer", "2", "--head", "1", "1")[1].splitlines()) == 1


def test_ids_and_models_without_a_tokenizer(run: Any, lm: LanguageModel, tmp_path: Path) -> None:
    assert run("464 3797 3332", "--ids", "--json") == run("The cat sat", "--json")
    bare = LanguageModel(lm.model)
    assert torch.equal(bare.attention([464, 3797]), lm.attention("The cat"))
    path = tmp_path / "page.html"
    code, out, err = run("The cat sat", "--layer", "1", "--head", "0", "2", "--ablate", "0.3", "--html", str(path))
    assert (code, err) == (0, "") and out.startswith(f"{path}: 1 x 2 heads, 3 tokens, ")
    data = page_data(path.read_text(encoding="utf-8"))
    assert (data["layers"], data["heads"], data["ablated"]) == ([1], [0, 2], ["0.3"])


def test_json_with_a_page_is_json_alone(run: Any, tmp_path: Path) -> None:
    for number, options in enumerate(([], ["--roles"], ["--lens"], ["--rank"])):
        path = tmp_path / f"{number}.html"
        plain = run("The cat sat", "--json", *options)
        assert run("The cat sat", "--json", *options, "--html", str(path)) == plain and path.is_file()
        assert all(json.loads(line) for line in plain[1].splitlines()) and plain[0] == 0
        assert run("The cat sat", *options, "--html", str(path))[1].startswith(f"{path}: 3 x 4 heads, ")


def test_ablation_reaches_every_view(run: Any, lm: LanguageModel, tmp_path: Path) -> None:
    text, off = "a cat, a dog, a cat", ["0.1", "1.2"]
    ids = Tokenizer.gpt2().encode(text)
    pairs = [(0, 1), (1, 2)]

    def records(*options: str) -> list[Any]:
        code, out, err = run(text, "--json", *options, "--ablate", *off)
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]

    weights = lm.attention(text, ablate=off)
    assert not torch.allclose(weights, lm.attention(text), atol=1e-3)
    path = tmp_path / "page.html"
    records("--html", str(path))
    data = page_data(path.read_text(encoding="utf-8"))
    rows, columns = torch.tril_indices(len(ids), len(ids))
    assert (stored_weights(data) - weights[:, :, rows, columns]).abs().max() < 8e-6
    scores = heads.head_roles(weights, ids)
    for role, grid in data["maps"][0]["scores"].items():
        assert torch.allclose(torch.tensor(grid), scores[role], atol=6e-5)
    for record in records("--roles"):
        assert all(record[role] == scores[role][record["layer"], record["head"]].item() for role in scores)
    model = heads.without_heads(lm.model, pairs)
    found = heads.lens(model, ids)
    assert [record["norms"] for record in records("--lens")] == found.norms.tolist()
    expected = {one[:2]: one[2] for one in heads.ablation_losses(model, ids, [(0, 0), (2, 3)])}
    rises = {(record["layer"], record["head"]): record["increase"] for record in records("--rank")}
    assert all(abs(rises[pair] - rise) < 1e-9 for pair, rise in expected.items())
    assert rises[0, 1] == rises[1, 2] == 0  # off already


def test_roles_of_chosen_heads(run: Any) -> None:
    text = "a cat, a dog, a cat"
    all_of_them = [json.loads(line) for line in run(text, "--roles", "--json")[1].splitlines()]
    code, out, err = run(text, "--roles", "--json", "--layer", "2", "0", "--head", "3", "1")
    assert (code, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == [all_of_them[at] for at in (11, 9, 3, 1)]


def test_roles_on_a_text_and_on_random_tokens(run: Any, lm: LanguageModel) -> None:
    text = "a cat, a dog, a cat"
    ids = Tokenizer.gpt2().encode(text)
    scores = heads.head_roles(lm.attention(ids), ids)
    code, out, err = run(text, "--roles", "--json")
    assert (code, err) == (0, "")
    for record in map(json.loads, out.splitlines()):
        for role in scores:
            assert record[role] == scores[role][record["layer"], record["head"]].item()
    code, out, err = run(text, "--roles")
    assert (code, err, len(out.splitlines())) == (0, "", 1 + 5 + 2 + 12) and "on this text" in out
    best = scores["previous"].argmax().item()
    assert f"  previous   {best // 4}.{best % 4} {scores['previous'].max():.3f}  " in out
    once = run("one two", "--roles")[1]
    assert "duplicate  - (no row to judge it by)" in once
    assert json.loads(run("one two", "--roles", "--json")[1].splitlines()[0])["induction"] is None
    code, out, err = run("--roles")
    assert (code, err) == (0, "") and out.startswith("head roles on 100 random tokens that come twice, from 0 to 1\n")
    assert run("--roles")[1] == out


def test_ranking_is_sorted(run: Any, lm: LanguageModel) -> None:
    code, out, err = run("The cat sat on the mat", "--rank", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(records)) == (0, "", 12)
    rises = [record["increase"] for record in records]
    assert rises == sorted(rises, reverse=True)
    plain = lm.score("The cat sat on the mat").mean
    for record in records:
        name = f"{record['layer']}.{record['head']}"
        without = lm.score("The cat sat on the mat", ablate=[name]).mean
        assert abs(record["increase"] - (plain - without)) < 1e-9
    code, out, err = run("The cat sat on the mat", "--rank", "--layer", "1")
    assert (code, err, len(out.splitlines())) == (0, "", 5)


def test_lens(run: Any, lm: LanguageModel) -> None:
    found = heads.lens(lm.model, [464, 3797, 3332])
    code, out, err = run("The cat sat", "--lens", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [record["stage"] for record in records] == ["embeddings", "block 0", "block 1", "block 2"]
    for stage, record in enumerate(records):
        assert torch.equal(torch.tensor(record["norms"]), found.norms[stage])
        best = int(found.logits[stage].argmax())
        assert terminal.token_record(lm.tokenizer, best).items() <= record["top"][0].items()
        assert abs(record["top"][0]["probability"] - found.logits[stage].softmax(-1).max().item()) < 1e-6
    assert json.loads(out.splitlines()[-1])["top"][0]["id"] == lm.generate("The cat sat", max_new_tokens=1).ids[0]
    code, out, err = run("The cat sat", "--lens")
    assert (code, err, len(out.splitlines())) == (0, "", 5)
    assert run("The", "--lens")[0] == 0


def test_ablate_reaches_generate(folder: Path, lm: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    heads = ["0.1", "1.2", "2.0", "2.3"]
    expected = lm.generate("The cat", max_new_tokens=12, ablate=heads).text
    assert expected != lm.generate("The cat", max_new_tokens=12).text
    base = ["generate", "The cat", "-n", "12", "--offline", "--device", "cpu", "-m", str(folder)]
    assert main([*base, "--ablate", *heads[:2], "--ablate", *heads[2:]]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert main([*base, "--json", "--ablate", *heads]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected


@pytest.mark.parametrize("host", DEFAULTS)
def test_the_hosts_defaults_change_no_view(lm: LanguageModel, host: str) -> None:
    def views() -> list[Any]:
        ids, pairs = lm.encode("a cat, a dog, a cat"), [(0, 1), (2, 3)]
        weights, tokenizer, screen = lm.attention(ids), lm.tokenizer, terminal.Screen()
        labels, roles = [terminal.label(tokenizer, id) for id in ids], heads.head_roles(weights, ids)
        found = heads.lens(lm.model, ids)
        return [
            *terminal.layer_lines(weights, labels, 1, screen),
            *terminal.head_lines(weights, labels, 1, 2, screen),
            *terminal.head_records(weights, ids, tokenizer, pairs),
            *terminal.role_records(roles, pairs),
            *terminal.role_lines(roles, pairs, "this text"),
            *terminal.lens_records(found, tokenizer),
            *terminal.lens_lines(found, tokenizer),
            page.page(weights, ids, tokenizer, roles=[("this text", roles)]),
        ]

    expected = views()
    with default(host):
        assert views() == expected


# Bad input


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["The cat", "--layer", "3"], 2, "--layer 3 is out of range: the model's layers are 0 to 2"),
        (["The cat", "--layer", "-1"], 2, "--layer -1 is out of range"),
        (["The cat", "--head", "0", "4"], 2, "--head 4 is out of range: the model's heads are 0 to 3"),
        (["--layer", "1", "The cat"], 2, "--layer: invalid int value: 'The cat'"),
        (["--head", "The cat"], 2, "--head: invalid int value: 'The cat'"),
        (["The cat", "--layer", "1.5"], 2, "--layer: invalid int value: '1.5'"),
        (["The cat", "--html", ""], 2, "--html needs the name of a file to write"),
        (["The cat", "--ablate", "0.9"], 2, "ablate names heads as layer.head, from 0.0 to 2.3, not '0.9'"),
        (["The cat", "--ablate", "zero"], 2, "write heads as LAYER.HEAD, and the prompt before --ablate, not 'zero'"),
        (["cat " * 300], 1, "the text must have 2 to 256 tokens, not 301"),
        (["cat " * 300, "--lens"], 1, "tokens, not 301"),
        (["cat " * 300, "--rank"], 1, "tokens, not 301"),
        (["cat " * 300, "--html", "page.html"], 1, "tokens, not 301"),
        (["The"], 1, "the text must have 2 to 256 tokens, not 1"),
        ([""], 1, "tokens, not 0"),
        (["The", "--html", "page.html"], 1, "tokens, not 1"),
        (["The", "--rank"], 1, "tokens, not 1"),
        (["", "--lens"], 1, "tokens, not 0"),
        ([], 2, "no prompt"),
        (["--html", "page.html", "--roles"], 2, "no prompt"),
        (["The cat", "--lens", "--layer", "0"], 2, "--lens shows every block as a whole"),
        (["The cat", "--lens", "--roles"], 2, "not allowed with"),
        (["The cat", "--html", "no/such/folder/page.html"], 1, "no/such/folder/page.html: No such file or directory"),
        (["1 x", "--ids"], 1, "with --ids the prompt is token ids"),
        (["1 99999", "--ids"], 1, "token id 99999 is outside the vocabulary"),
    ],
)
def test_bad_input(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    got, out, err = run(*arguments)
    assert (got, out) == (code, "") and message in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_page_that_would_pass_the_limit_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = torch.eye(1024).expand(12, 12, 1024, 1024)  # a full context of the real GPT-2
    message = r"the page for 1024 tokens and 144 heads would take 202 MB, more than 50: shorten the text, or choose one"
    with pytest.raises(PromptError, match=message):
        page.page(weights, [0] * 1024, None)
    page.check_page(1024, 12)  # one layer fits
    monkeypatch.setattr(page, "PAGE_LIMIT", 1000)
    monkeypatch.setattr(heads, "patterns", None)  # refused before any work
    code, out, err = run("The cat sat on the mat " * 10, "--html", str(tmp_path / "page.html"))
    assert (code, out) == (1, "") and "would take" in err and not list(tmp_path.iterdir())


# The page


def test_data_is_read_from_a_zip_and_its_absence_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path beside the module's own file is none there."""

    def use(name: str) -> Any:
        with zipfile.ZipFile(tmp_path / "minigpt.zip", "w") as archive:
            archive.write(ROOT / "minigpt" / "data" / name, f"minigpt/data/{name}")
        return lambda package: zipfile.Path(tmp_path / "minigpt.zip", f"{package}/")

    def empty() -> str:
        return page.page(torch.eye(2).expand(1, 1, 2, 2), [0, 1], None)

    known = empty(), published.read()
    sentence = r"^this installation of minigpt lacks data/{}: install minigpt again$"
    monkeypatch.setattr(resources, "files", use("attention.html"))
    assert empty() == known[0]
    with pytest.raises(MiniGPTError, match=sentence.format("published.json")):
        published.read()
    monkeypatch.setattr(resources, "files", use("published.json"))
    assert published.read() == known[1]
    for place in (resources.files, lambda package: tmp_path / "minigpt.zip", lambda package: tmp_path):
        monkeypatch.setattr(resources, "files", place)  # in a zip, below a file, in a folder
        with pytest.raises(MiniGPTError, match=sentence.format("attention.html")):
            empty()


def page_data(html: str) -> Any:
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(found)


def stored_weights(data: Any) -> Tensor:
    """The weights that a page holds: its layers, its heads, the lower triangles row by row."""
    layers = [torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int16) for text in data["weights"]]
    return (torch.stack(layers).int() % 65536).view(len(layers), len(data["heads"]), -1) / 65535


def test_page_holds_the_weights_and_escapes_the_text(lm: LanguageModel) -> None:
    ids = Tokenizer.gpt2().encode(TEXT)
    weights = lm.attention(ids)
    html = page.page(weights, ids, lm.tokenizer, model="</script><script>alert(1)</script>", layers=[2, 0])
    assert html.count("<script") == 2 and html.count("</script>") == 2
    assert not re.search(r"""(?:src|href)=|@import|url\(|https?:|fetch\(|XMLHttp""", html)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert html.index(f'<meta http-equiv="Content-Security-Policy" content="{policy}">') < html.index("<script")
    data = page_data(html)
    assert data["layers"] == [2, 0] and data["heads"] == [0, 1, 2, 3] and len(data["tokens"]) == len(ids)
    rows, columns = torch.tril_indices(len(ids), len(ids))
    assert (stored_weights(data) - weights[[2, 0]][:, :, rows, columns]).abs().max() < 8e-6  # half a step of 1 / 65535


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find()
    if executable is None:
        pytest.skip("no Chromium here: install one (Debian: apt-get install chromium), or set MINIGPT_BROWSER")
    running = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def shown(folder: Path, lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """The page that the command writes for TEXT, and the tensor it is of."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    options = ["--offline", "--device", "cpu", "--roles", "--json", "-m", str(folder)]
    assert main(["attention", TEXT, "--html", str(path), *options]) == 0
    return path, lm.attention(TEXT)


def bars(browser: Browser) -> list[tuple[str, float]]:
    """The tokens and weights that the page lists for the row it shows."""
    cells = browser.js("[...document.querySelectorAll('#bars > span')].map(e => e.textContent)")
    return [(cells[at], float(cells[at + 1])) for at in range(0, len(cells), 2)]


def page_weights(browser: Browser, shape: Any) -> Tensor:
    script = f"""(() => {{
        const [L, H, T] = {list(shape[:3])}, count = n => [...Array(n).keys()];
        return count(L).map(l => count(H).map(h => count(T).map(p => count(T).map(q => weight(l, h, p, q)))));
    }})()"""
    return torch.tensor(browser.js(script))


@pytest.mark.slow
def test_browser_values_equal_the_tensor(browser: Browser, shown: tuple[Path, Tensor]) -> None:
    path, weights = shown
    browser.open(path)
    assert (page_weights(browser, weights.shape) - weights).abs().max() < 8e-6  # half a step of 1 / 65535
    last = weights[0, 0, -1]
    listed = bars(browser)
    for (_, value), expected in zip(listed[:14], last.sort(descending=True).values.tolist(), strict=False):
        assert abs(value - expected) < 6e-5  # four digits, and half a step
    assert abs(sum(value for _, value in listed) - 1) < 2e-3
    assert browser.errors == [] and browser.requests == [path.as_uri()]


@pytest.mark.slow
def test_browser_tabs_and_layers(browser: Browser, shown: tuple[Path, Tensor]) -> None:
    path, weights = shown
    browser.open(path)
    assert browser.text("#title") == "Layer 0, head 0"
    browser.click(*browser.at("document.querySelectorAll('#heads [role=tab]')[2]"))
    assert browser.text("#title") == "Layer 0, head 2"
    assert browser.js("[...document.querySelectorAll('[role=tab]')].map(e => e.ariaSelected)").index("true") == 2
    assert abs(bars(browser)[0][1] - weights[0, 2, -1].max().item()) < 6e-5
    browser.press("ArrowRight")
    assert browser.text("#title") == "Layer 0, head 3" and browser.js("document.activeElement.textContent") == "3"
    browser.press("]")
    assert browser.text("#title") == "Layer 1, head 3"
    browser.click(*browser.at("document.querySelectorAll('#layers [role=radio]')[2]"))
    assert browser.text("#title") == "Layer 2, head 3"
    assert abs(bars(browser)[0][1] - weights[2, 3, -1].max().item()) < 6e-5
    browser.press("ArrowRight")  # from the last layer to the first
    assert browser.text("#title") == "Layer 0, head 3"
    assert browser.js("location.hash") == "#layer=0&head=3"
    browser.open(path, "#layer=1&head=2")
    assert browser.text("#title") == "Layer 1, head 2" and browser.errors == []


@pytest.mark.slow
def test_browser_hover_and_keys_show_a_row(browser: Browser, shown: tuple[Path, Tensor]) -> None:
    path, weights = shown
    browser.open(path, "#layer=1&head=1")
    T = weights.shape[-1]
    token = "document.querySelectorAll('#text .token')"
    browser.move(*browser.at(f"{token}[5]"))
    assert "(position 5)" in browser.text("#reads")
    expected = weights[1, 1, 5, :6].sort(descending=True).values.tolist()
    assert [value for _, value in bars(browser)] == pytest.approx(expected, abs=6e-5)
    browser.move(2, 2)
    assert f"(position {T - 1})" in browser.text("#reads")  # back to the one that is kept
    left, top, size = browser.js(
        "(r => [r.x, r.y, size])((canvas.scrollIntoView({block: 'center'}), canvas.getBoundingClientRect()))"
    )
    browser.move(left + 3.5 * size, top + 7.5 * size)
    assert float(browser.text("#tip b")) == pytest.approx(weights[1, 1, 7, 3].item(), abs=6e-5)
    assert "(position 7)" in browser.text("#reads") and browser.js("document.getElementById('tip').hidden") is False
    browser.move(left + 7.5 * size, top + 3.5 * size)  # the future: nothing there
    assert browser.js("document.getElementById('tip').hidden") is True
    browser.js("$map.focus()")
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft"):
        browser.press(key)
    row, column = T - 3, T - 4
    assert browser.text("#spoken").endswith(f"{weights[1, 1, row, column].item():.4f}")
    assert browser.errors == []


@pytest.mark.slow
def test_browser_shows_tokens_exactly(browser: Browser, shown: tuple[Path, Tensor], lm: LanguageModel) -> None:
    path, _ = shown
    browser.open(path)
    texts = browser.js("[...document.querySelectorAll('#text .token')].map(e => e.textContent)")
    assert texts == ["".join(page.pieces(lm.tokenizer, id)) for id in Tokenizer.gpt2().encode(TEXT)]
    assert "\\xf0\\x9f" in "".join(texts) and "⏎" in texts and "⇥" in texts and "script" in texts
    assert browser.js("document.querySelectorAll('b').length") == 0 and browser.errors == []


@pytest.mark.slow
def test_browser_takes_no_token_for_markup(browser: Browser, tmp_path: Path) -> None:
    class Hostile(Tokenizer):
        def __init__(self) -> None:
            self.tokens = [
                b"<img src=x onerror=document.title='run'>",
                b"</script><script>document.title='run'</script>",
            ]

        def __contains__(self, id: object) -> bool:
            return id in (0, 1)

        def token_bytes(self, id: int) -> bytes:
            return self.tokens[id]

    path = tmp_path / "page.html"
    path.write_text(page.page(torch.eye(2).expand(1, 1, 2, 2), [0, 1], Hostile(), model="<b>"), encoding="utf-8")
    browser.open(path)
    browser.move(*browser.at("document.querySelectorAll('#text .token')[1]"))
    assert (
        browser.js("document.querySelectorAll('img, b:not(#tip b), script').length") == 2
    )  # the page's own two scripts
    assert browser.js("document.title") == "Attention in <b>" and browser.errors == []
    assert browser.js("document.querySelector('#text .token').textContent").startswith("<img␣src=x")


@pytest.mark.slow
def test_browser_all_heads_and_roles(browser: Browser, shown: tuple[Path, Tensor]) -> None:
    path, weights = shown
    browser.open(path, "#layer=2&head=all")
    assert browser.js("document.querySelectorAll('#all canvas').length") == 4
    pixel = browser.js(
        "[...document.querySelectorAll('#all canvas')[1].getContext('2d').getImageData(0, 4, 1, 1).data]"
    )
    expected = browser.js(f"channels({weights[2, 1, 4, 0].item()})")
    assert max(abs(a - b) for a, b in zip(pixel[:3], expected, strict=True)) <= 2
    browser.click(*browser.at("document.querySelectorAll('#all button')[1]"))
    assert browser.text("#title") == "Layer 2, head 1"
    browser.click(*browser.at("document.querySelectorAll('#heads [role=tab]')[5]"))
    assert browser.js("document.querySelectorAll('#roles .grid').length") == 10  # five on the text, five on random
    label = browser.js("document.querySelectorAll('#roles .grid')[0].querySelectorAll('button')[6].ariaLabel")
    ids = Tokenizer.gpt2().encode(TEXT)
    score = heads.head_roles(weights, ids)["previous"][1, 2].item()
    assert label == f"previous, head 1.2: {score:.3f}"
    browser.click(*browser.at("document.querySelectorAll('#roles .grid')[0].querySelectorAll('button')[6]"))
    assert browser.text("#title") == "Layer 1, head 2" and browser.errors == []


def pixel(browser: Browser, position: tuple[int, int]) -> list[int]:
    """The colour in the middle of a cell (row, column) of the heat map."""
    row, column = position
    middle = f"{column} * size + Math.floor(size / 2), {row} * size + Math.floor(size / 2)"
    found: list[int] = browser.js(f"[...canvas.getContext('2d').getImageData({middle}, 1, 1).data]")
    return found


@pytest.mark.slow
def test_browser_colours_rows_down_and_columns_across(browser: Browser, tmp_path: Path) -> None:
    """Weights of 0 and 1, whose colours are known, in a pattern that is not its own mirror image."""
    light, deep, empty = [0xF4, 0xF1, 0xEC, 255], [0x2E, 0x0F, 0x3F, 255], [0, 0, 0, 0]
    pattern = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    path = tmp_path / "page.html"
    path.write_text(page.page(pattern.expand(1, 1, 4, 4), [0, 1, 2, 3], None), encoding="utf-8")
    browser.open(path)
    for row in range(4):
        for column in range(4):
            expected = empty if column > row else deep if pattern[row, column] else light
            assert pixel(browser, (row, column)) == expected, (row, column)


@pytest.mark.slow
def test_browser_page_of_one_head(browser: Browser, run: Any, lm: LanguageModel, tmp_path: Path) -> None:
    """Layers and heads keep their numbers, and their role scores, where others are left out."""
    text, path = "a cat, a dog, a cat", tmp_path / "page.html"
    assert run(text, "--layer", "1", "--head", "2", "--html", str(path))[0] == 0
    ids = Tokenizer.gpt2().encode(text)
    weights = lm.attention(ids)
    scores = {role: grid[1, 2].item() for role, grid in heads.head_roles(weights, ids).items()}
    browser.open(path)
    assert browser.text("#title") == "Layer 1, head 2" and browser.js("location.hash") == "#layer=1&head=2"
    line = browser.text("#played")
    assert line.startswith("On this text: ")
    shown = {role: float(score) for role, score in re.findall(r"(\w+) (\d\.\d\d)", line)}
    assert shown == pytest.approx(scores, abs=0.0051)
    assert abs(bars(browser)[0][1] - weights[1, 2, -1].max().item()) < 6e-5 and browser.errors == []


@pytest.mark.slow
def test_browser_home_and_end(browser: Browser, shown: tuple[Path, Tensor]) -> None:
    path, weights = shown
    browser.open(path, "#layer=1&head=1")
    T = weights.shape[-1]
    browser.js("$map.focus()")
    for key, column in (("Home", 0), ("End", T - 1), ("ArrowLeft", T - 2)):
        browser.press(key)
        assert browser.js("[state.row, state.column]") == [T - 1, column]
        assert browser.text("#spoken").endswith(f"{weights[1, 1, -1, column].item():.4f}")
    browser.js("document.querySelector('#heads [aria-selected=true]').focus()")
    browser.press("Home")
    assert browser.text("#title") == "Layer 1, head 0"
    browser.press("End")
    assert browser.js("[state.tab, document.activeElement.textContent]") == ["roles", "roles"]


@pytest.mark.slow
def test_browser_adds_up_the_rest_of_a_long_row(browser: Browser, tmp_path: Path) -> None:
    weights = torch.arange(1.0, 21).expand(1, 1, 20, 20).tril()  # the last row: 1 to 20, of 210 in all
    path = tmp_path / "page.html"
    path.write_text(page.page(weights / weights.sum(-1, keepdim=True), list(range(20)), None), encoding="utf-8")
    browser.open(path)
    assert bars(browser)[0] == ("#19", round(20 / 210, 4)) and len(bars(browser)) == 15
    assert bars(browser)[14] == ("6 more", round((1 + 2 + 3 + 4 + 5 + 6) / 210, 4))
    browser.move(*browser.at("document.querySelectorAll('#text .token')[13]"))  # 14 tokens: all are listed
    assert len(bars(browser)) == 14 and bars(browser)[13] == ("#0", round(1 / 105, 4))


@pytest.mark.slow
def test_browser_keeps_the_row_that_was_clicked(browser: Browser, shown: tuple[Path, Tensor]) -> None:
    path, _ = shown
    browser.open(path, "#layer=1&head=1")
    browser.click(*browser.at("document.querySelectorAll('#text .token')[4]"))
    browser.move(2, 2)
    assert "(position 4)" in browser.text("#reads")
    left, top, size = browser.js(
        "(r => [r.x, r.y, size])((canvas.scrollIntoView({block: 'center'}), canvas.getBoundingClientRect()))"
    )
    browser.click(left + 2.5 * size, top + 8.5 * size)
    browser.move(2, 2)
    assert "(position 8)" in browser.text("#reads") and browser.js("state.kept") == 8


@pytest.mark.slow
def test_browser_keyboard_reaches_everything(browser: Browser, shown: tuple[Path, Tensor]) -> None:
    """The focus goes to the heat map where a head is opened, and stays in its place where the view is drawn anew."""
    path, weights = shown
    focus = "document.activeElement.getAttribute('aria-label') || ''"
    browser.open(path, "#layer=0&head=all")
    browser.js("document.querySelectorAll('#all button')[2].focus()")
    browser.press("]")
    assert browser.js("[state.layer, state.tab]") == [1, "all"]
    assert browser.js("[...document.querySelectorAll('#all button')].indexOf(document.activeElement)") == 2
    browser.press("Enter")
    assert browser.text("#title") == "Layer 1, head 2" and browser.js("document.activeElement === $map")
    browser.press("ArrowLeft")
    assert browser.js("state.row") == weights.shape[-1] - 1 and browser.js("state.column !== null")
    browser.open(path, "#head=roles")
    browser.js("document.querySelector('#roles .grid button').focus()")
    for key, head in (("ArrowRight", "0.1"), ("ArrowDown", "1.1"), ("ArrowDown", "2.1"), ("ArrowDown", "2.1")):
        browser.press(key)
        assert browser.js(focus).startswith(f"previous, head {head}: ")
    browser.press("ArrowLeft")
    browser.press("ArrowUp")
    assert browser.js(focus).startswith("previous, head 1.0: ")
    browser.press("[")
    browser.press("]")
    assert browser.js(focus).startswith("previous, head 1.0: ")
    browser.press("Enter")
    assert browser.text("#title") == "Layer 1, head 0" and browser.js("document.activeElement === $map")
    tabs = browser.js("[...document.querySelectorAll('[role=tab]')].map(e => e.getAttribute('aria-controls'))")
    assert set(tabs) == {"view"} and browser.js("document.getElementById('view').role") == "tabpanel"
    browser.js("location.hash = '#layer=2&head=3'")
    browser.js("new Promise(done => setTimeout(done, 50))")
    assert browser.text("#title") == "Layer 2, head 3" and browser.errors == []


@pytest.mark.slow
def test_browser_role_maps_of_twelve_heads_stand_side_by_side(browser: Browser, tmp_path: Path) -> None:
    weights = torch.rand(12, 12, 6, 6).tril()
    weights /= weights.sum(-1, keepdim=True)
    for number, (ids, grids) in enumerate((([1, 2, 3, 1, 2, 3], 5), ([1, 2, 3, 4, 5, 6], 3))):
        path = tmp_path / f"{number}.html"
        roles = [("this text", heads.head_roles(weights, ids))]
        path.write_text(page.page(weights, ids, None, roles=roles), encoding="utf-8")
        browser.open(path, "#head=roles")
        tops = browser.js("[...document.querySelectorAll('.maps section')].map(e => e.getBoundingClientRect().y)")
        assert len(tops) == 5 and len(set(tops)) == 1
        assert browser.js("document.querySelectorAll('#roles .grid').length") == grids
        assert browser.text(".maps").count("no row to judge it by") == 5 - grids  # no token comes twice
        browser.screenshot(tmp_path / f"{number}.png")


@pytest.mark.slow
def test_browser_light_and_dark(browser: Browser, shown: tuple[Path, Tensor], tmp_path: Path) -> None:
    path, _ = shown
    background = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        browser.open(path, scheme=scheme)
        seen.append((browser.js(background), browser.js("getComputedStyle(chips[0]).backgroundColor")))
    assert seen[0][0] == "rgb(250, 249, 246)" and seen[1][0] == "rgb(17, 17, 22)" and seen[0][1] != seen[1][1]
    for colour in (seen[0][0], seen[1][0]):
        browser.click(*browser.at("document.querySelector('#theme')"))
        assert browser.js(background) == colour
    browser.open(path, scheme="light")
    browser.click(*browser.at("document.querySelector('#theme')"))
    assert browser.js(background) == seen[1][0]
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "width", "smallest"), [(60, 1280, 11), (256, 1280, 3), (256, 500, 3)])
def test_browser_long_texts_stay_usable(
    browser: Browser, lm: LanguageModel, tmp_path: Path, tokens: int, width: int, smallest: int
) -> None:
    ids = (Tokenizer.gpt2().encode("The little fox went into the big forest and saw a bird. ") * 30)[:tokens]
    path = tmp_path / "page.html"
    path.write_text(page.page(lm.attention(ids), ids, lm.tokenizer), encoding="utf-8")
    browser.open(path, width=width)
    assert browser.js("size") >= smallest
    # nothing but the heat map's own box scrolls sideways
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    visible = browser.js("labels.filter(([down]) => !down.hidden).length")
    assert visible == tokens if tokens == 60 else 20 < visible < 100
    browser.move(*browser.at("document.querySelectorAll('#text .token')[33]"))
    assert "(position 33)" in browser.text("#reads") and browser.js("labels[33][0].hidden") is False
    assert browser.errors == []
