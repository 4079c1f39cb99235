"""Make the README's pictures of the attention views from the demo model: python scripts/pictures/make.py

Needs Chromium, as the tests of the page do. Writes page.png and terminal.png beside this file.
"""

from __future__ import annotations

import html
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from browser import Browser, find  # noqa: E402

import minigpt  # noqa: E402
from minigpt.interpret.heads import head_roles  # noqa: E402
from minigpt.interpret.page import page  # noqa: E402
from minigpt.interpret.terminal import Screen, head_lines, label, layer_lines  # noqa: E402

STORY = "Once upon a time, there was a little fox. The fox lived in a big forest. One day, the fox saw a red bird."
SENTENCE = "The cat sat on the mat"
LAYER, HEAD, TOKEN = 0, 1, 24  # what page.png shows


def terminal_page(lm: minigpt.LanguageModel) -> str:
    """The command and what it prints on a terminal, as a page: ANSI colours become spans."""
    labels = [label(lm.tokenizer, id) for id in lm.encode(SENTENCE)]
    weights = lm.attention(SENTENCE)
    screen = Screen(width=100, colour=True)
    lines = [f'$ python -m minigpt attention -m demo "{SENTENCE}"']
    lines += [*layer_lines(weights, labels, 0, screen), ""]
    lines += [f'$ python -m minigpt attention -m demo "{SENTENCE}" --layer 0 --head 0']
    lines += head_lines(weights, labels, 0, 0, screen)
    text = html.escape("\n".join(lines), quote=False)
    text = re.sub(
        "\x1b\\[48;5;(\\d+)m([^\x1b]*)",
        lambda found: f"<span style='background:{rgb(found[1])}'>{found[2]}</span>",
        text,
    ).replace("\x1b[0m", "")
    return (
        "<meta charset=utf-8><body style='margin:0;background:#16161c;color:#e6e4ea'>"
        f"<pre style='margin:0;padding:18px 22px;font:15px/1.35 DejaVu Sans Mono,monospace'>{text}</pre>"
    )


def rgb(number: str) -> str:
    """A colour of the 256-colour palette: a 6 x 6 x 6 cube from 16, greys from 232."""
    code = int(number)
    if code >= 232:
        return f"rgb({8 + 10 * (code - 232)} {8 + 10 * (code - 232)} {8 + 10 * (code - 232)})"
    cube = [0, 95, 135, 175, 215, 255]
    code -= 16
    return f"rgb({cube[code // 36]} {cube[code // 6 % 6]} {cube[code % 6]})"


def main() -> None:
    """Both pictures."""
    executable = find()
    if executable is None:
        sys.exit("no Chromium here: install one, or set MINIGPT_BROWSER")
    lm = minigpt.load("demo", device="cpu")
    ids = lm.encode(STORY)
    weights = lm.attention(ids)
    roles = [("this text", head_roles(weights, ids))]
    with tempfile.TemporaryDirectory() as scratch:
        first, second = Path(scratch, "page.html"), Path(scratch, "terminal.html")
        first.write_text(page(weights, ids, lm.tokenizer, model="demo", roles=roles), encoding="utf-8")
        second.write_text(terminal_page(lm), encoding="utf-8")
        browser = Browser(executable, Path(scratch, "profile"))
        browser.open(first, f"#layer={LAYER}&head={HEAD}", width=1180, height=1100)
        browser.move(*browser.at(f"document.querySelectorAll('#text .token')[{TOKEN}]"))
        browser.screenshot(HERE / "page.png")
        browser.open(second, width=880, height=372)
        browser.screenshot(HERE / "terminal.png")
        browser.close()


if __name__ == "__main__":
    main()
