"""Text as it comes, token by token: whole characters only, and nothing after a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from minigpt.text.tokenizer import Tokenizer


class TextStream:
    """Decodes ids one at a time and never gives half a character. All that it gives, joined, is decode(ids)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this id completes: "" inside a character. Raises PromptError for an id that does not exist."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """The rest: U+FFFD if the ids ended inside a character, else ""."""
        return self._decoder.decode(b"", final=True)


class StopText:
    """Finds stop strings in streamed text: holds back what may begin one, cuts exactly before the first one found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take more text, give what can be shown. Nothing more is shown once a stop string is found."""
        if self.found:
            return ""
        self.held += text
        if hits := [at for at in map(self.held.find, self.stops) if at >= 0]:
            self.found, cut = True, min(hits)
        else:  # keep the longest end of the text that begins a stop string
            begins = (i for i in range(len(self.held)) if any(stop.startswith(self.held[i:]) for stop in self.stops))
            cut = next(begins, len(self.held))
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown

    def flush(self) -> str:
        """No more text comes: what was held back, unless it is a stop string."""
        return "" if self.found else self.held
