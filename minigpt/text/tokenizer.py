"""Text to token ids and back: tiktoken's BPE over a checkpoint's own vocabulary, or over GPT-2's, shipped in data/."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import Any

import tiktoken

from minigpt.checks import short_repr
from minigpt.errors import CheckpointError, PromptError, TokenizerError
from minigpt.text.folder import Added, Found, read_folder
from minigpt.text.vocabulary import END_OF_TEXT, gpt2_vocabulary, official_files, text_bytes

# tiktoken's r50k pattern: GPT-2's pieces, by regular expressions that do not overflow on long words.
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Even so tiktoken panics on a million white-space characters that text follows: see Tokenizer._encode_ordinary.
_WHITE_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")  # \s there, not in re
_LONG_RUN = 500_000
_OWN = "GPT-2's own"


class Tokenizer:
    """Byte-level BPE with GPT-2's rules. `id in tokenizer`: whether the id exists (padded vocabularies have gaps).

    n_vocab: the largest id + 1.      origin: where the vocabulary is from, in a few words.
    """

    def __init__(self, found: Found, origin: str) -> None:
        """For gpt2 and from_folder, which are the ways to make one."""
        (tokens, ids, others), added = found.vocabulary, found.added
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self._bpe = tiktoken.Encoding("minigpt", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._ids = None if ids == range(len(tokens)) else ids  # None: ranks are ids
        self._bytes = dict(zip(ids, tokens, strict=True))
        self._bytes |= {id: text_bytes(spelling) for spelling, id in others.items()}
        self._bytes.pop(-1, None)
        own = len(self._bytes)
        self._bytes |= {token.id: text.encode(errors="replace") for text, token in added.items()}
        more = f" + {len(self._bytes) - own} added" if len(self._bytes) > own else " tokens"
        self.origin = origin or f"{found.source or _OWN}, {own}{more}"
        self._source, self._files, self._added = found.source, found.files, added
        texts = sorted(added, key=len, reverse=True)  # the longest match wins
        groups = [[re.escape(text) for text in texts if added[text].normalized is last] for last in (False, True)]
        self._patterns = [re.compile("|".join(group)) for group in groups if group]
        self.n_vocab = max(self._bytes) + 1

    @classmethod
    def gpt2(cls) -> Tokenizer:
        """The vocabulary of OpenAI's GPT-2, 50257 tokens, from this package."""
        end = Added(50256, special=True, normalized=False)
        return cls(Found(gpt2_vocabulary(), {END_OF_TEXT: end}, "", {}), _OWN)

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, config: Mapping[str, Any] | None = None) -> Tokenizer | None:
        """The tokenizer of the checkpoint in `folder`: tokenizer.json, else vocab.json + merges.txt, and added tokens.

        config: the contents of config.json, which may name another tokenizer.
        A folder without one gets GPT-2's if vocab_size allows, with a warning if the model looks like another; else
        None: such a model takes token ids only. Ids may have gaps, as in pruned and padded vocabularies.
        Raises TokenizerError, naming the file and the cure, if it is damaged or is not GPT-2's kind of tokenizer.
        """
        try:
            found = read_folder(folder, vocab_size, config or {})
        except CheckpointError as error:
            raise TokenizerError(str(error)) from None
        return found and cls(found, "" if found.source or found.files else f"{_OWN}: the folder has none")

    def files(self) -> dict[str, bytes]:
        """{name: contents} of the files that stand for this tokenizer: as they were read, or OpenAI's, made anew."""
        return {**self._files, **({} if self._source else official_files())}

    @property
    def special_tokens(self) -> dict[str, int]:
        """{text: id} of the tokens that need special=True."""
        return {text: token.id for text, token in self._added.items() if token.special}

    def same_as(self, other: Tokenizer) -> bool:
        """Whether both have the same tokens."""
        return self._bytes == other._bytes

    def __contains__(self, id: object) -> bool:
        return id in self._bytes

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of `text`; nothing is put before it, so "" gives []. Lone surrogates count as U+FFFD.

        special: special tokens spelled out in the text, such as <|endoftext|>, become one id; else they are plain text.
        Raises PromptError if the text needs a byte that this vocabulary has no token for.
        """
        ids: list[int] = []
        for part in self._split(text, special, self._patterns):
            ids += [part] if isinstance(part, int) else self._encode_ordinary(part)
        return ids

    def _split(self, text: str, special: bool, patterns: Sequence[re.Pattern[str]]) -> Iterator[str | int]:
        """`text` cut at its added tokens; they come as ids."""
        if not patterns:
            yield text
            return
        start = 0
        for match in patterns[0].finditer(text):
            token = self._added[match[0]]
            if special or not token.special:
                yield from self._split(text[start : match.start()], special, patterns[1:])
                yield token.id
                start = match.end()
        yield from self._split(text[start:], special, patterns[1:])

    def _encode_ordinary(self, text: str) -> list[int]:
        cuts = [0, len(text)]
        if len(text) > _LONG_RUN:
            # The pattern leaves the last character of a run of white space to the text after it, so a cut before it
            # changes no id; and a run that ends its text is one that tiktoken can take.
            runs = [run for run in _WHITE_SPACE.finditer(text) if run.end() - run.start() > _LONG_RUN]
            cuts[1:1] = [run.end() - 1 for run in runs if run.end() < len(text)]
        ranks = [rank for start, end in pairwise(cuts) for rank in self._bpe.encode_ordinary(text[start:end])]
        if self._ids is None:
            return ranks
        ids = [self._ids[rank] for rank in ranks]
        if -1 in ids:
            byte = self._bpe.decode_single_token_bytes(ranks[ids.index(-1)])[0]
            raise PromptError(f"the text needs the byte 0x{byte:02X}, which the model's vocabulary has no token for")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, exactly: special tokens spelled out, no clean-up of spaces, U+FFFD for invalid UTF-8.

        Raises PromptError for an id that does not exist.
        """
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """What one id stands for, maybe part of a character. Raises PromptError for an id that does not exist."""
        try:
            return self._bytes[index(id)]
        except KeyError:
            wrong = f"token id {short_repr(id)} is not one of the tokenizer's, below {self.n_vocab}"
            raise PromptError(wrong) from None
