"""Trains a small GPT-2 on text files, with minigpt's own modules, and writes it in the official layout.

    python scripts/train_demo.py stories.txt --output weights/mine

Documents are separated by <|endoftext|>. Those whose SHA-256 (of the stripped text, in hex) begins with 0 are held out.
The state is saved as the run goes, in OUTPUT.state: after an interruption the same command with --resume goes on
exactly where the saved state ends. weights/demo/README.md has the commands that made the bundled model.
"""

from __future__ import annotations

import argparse
import bisect
import copy
import hashlib
import itertools
import lzma
import math
import os
import signal
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import BrokenBarrierError
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing
from tqdm import tqdm

import minigpt
from minigpt import GPT2, GPT2Config, MiniGPTError, Tokenizer

END = 50256
VOCAB_SIZE = 50257
WAIT = 1800  # seconds after which a process gives up on the others


def documents(path: Path) -> list[str]:
    """The documents of a text file (.xz too), stripped, empty ones left out. Raises MiniGPTError."""
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        texts = [text.strip() for text in data.decode().split("<|endoftext|>")]
    except UnicodeDecodeError as error:
        raise MiniGPTError(f"{path} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    except (OSError, lzma.LZMAError) as error:
        raise MiniGPTError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not any(texts):
        raise MiniGPTError(f"{path} is empty: there is nothing to train on")
    return [text for text in texts if text]


def held_out(text: str) -> bool:
    """Whether a document is for validation, never for training: about 1 in 16."""
    return hashlib.sha256(text.encode()).hexdigest().startswith("0")


def read(paths: Sequence[Path], context: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the documents for training and of the held-out ones. Raises MiniGPTError."""
    tokenizer, training, validation = Tokenizer.gpt2(), [], []
    for path in paths:
        texts = documents(path)
        encoded = [tokenizer.encode(text) for text in texts]
        n_tokens = sum(map(len, encoded))
        if n_tokens <= context:
            raise MiniGPTError(f"{path} is too short: {n_tokens} tokens, and one context takes {context + 1}")
        for text, ids in zip(texts, encoded, strict=True):
            (validation if held_out(text) else training).append(ids)
    if sum(map(len, training)) <= context:
        raise MiniGPTError("too short: what is not held out for validation does not fill one context")
    return training, validation


def batches(training: list[list[int]], context: int, batch: int, seed: int) -> Iterator[Tensor]:
    """[batch, context + 1] token ids, for ever. Every epoch has its own order of the documents.

    Each row begins where a document does, as prompts do; a document that the row's end cuts off begins the next row,
    but one that fills its row goes on in the next.
    """
    rows: list[Tensor] = []
    for epoch in itertools.count():
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        stream = torch.tensor([id for at in order for id in (END, *training[at])] + [END])
        starts = (stream == END).nonzero().flatten().tolist()
        start = 0
        while start + context < len(stream):
            rows.append(stream[start : start + context + 1])
            if len(rows) == batch:
                yield torch.stack(rows)
                rows = []
            cut = starts[bisect.bisect_right(starts, start + context) - 1]
            start = cut if cut > start else start + context


def loss_of(model: GPT2, rows: Tensor, used: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of each token given those before it, over the whole vocabulary. rows: [B, context + 1].

    used: sorted ids, all targets among them. The tokens left out then share one logit, that of their mean row, counted
    as often as there are of them. While those rows differ little, this is the same loss, several times faster.
    """
    with torch.autocast("cpu", torch.bfloat16):
        hidden, targets, table = model.hidden(rows[:, :-1]), rows[:, 1:].contiguous(), model.wte.weight
        if used is None or len(used) == len(table):
            logits = model.head(hidden)
        else:
            own, n_rest = table[used], len(table) - len(used)
            rest = (table.sum(0) - own.sum(0)) / n_rest
            bias = torch.tensor([0.0] * len(used) + [math.log(n_rest)])
            logits, targets = F.linear(hidden, torch.cat([own, rest[None]]), bias), torch.searchsorted(used, targets)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.inference_mode()
def validation_loss(model: GPT2, validation: list[list[int]], batch: int = 8) -> float:
    """Nats per token over [END] + document + [END], each cut to the context; nan without documents."""
    total, count = 0.0, 0
    rows = sorted((torch.tensor([END, *ids, END][: model.config.n_positions]) for ids in validation), key=len)
    training = model.training
    model.eval()
    for at in range(0, len(rows), batch):
        some = torch.nn.utils.rnn.pad_sequence(rows[at : at + batch], batch_first=True, padding_value=-100)
        logits, targets = model(some[:, :-1].clamp(min=0)), some[:, 1:].flatten()
        total += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()  # -100 is left out
        count += int((targets >= 0).sum())
    model.train(training)
    return total / count if count else math.nan


def parameter_groups(model: GPT2, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices; none for norms and biases."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def learning_rate(step: int, steps: int, warmup: int, peak: float, end: float) -> float:
    """Linear warm-up to `peak`, then a cosine down to `end`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return end + (peak - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2


class Share(NamedTuple):
    """What the processes of a run have in common: each adds its part of the gradient of the same parameters."""

    model: GPT2
    gradients: list[list[Tensor]]  # by process
    losses: Tensor  # by process
    barrier: Any
    options: argparse.Namespace
    first_step: int


def gradients(share: Share, rank: int, training: list[list[int]]) -> Iterator[int]:
    """At each step, once every process has its part of the gradient, the step's number. Dropout is seeded by step."""
    o, used = share.options, torch.tensor(sorted({END}.union(*training)))
    stream = itertools.islice(batches(training, o.context, o.batch, o.seed), share.first_step, o.steps)
    for step, batch in enumerate(stream, share.first_step):
        rows = batch[rank :: o.workers]
        share.barrier.wait(WAIT)  # every process waits here for the last update of the parameters
        torch.manual_seed((o.seed * 1_000_003 + step) * o.workers + rank)
        full = step >= o.steps - o.full_steps
        loss = loss_of(share.model, rows, None if full else used) * len(rows) / o.batch
        found = torch.autograd.grad(loss, list(share.model.parameters()))
        for kept, gradient in zip(share.gradients[rank], found, strict=True):
            kept.copy_(gradient)
        share.losses[rank] = loss.detach()
        share.barrier.wait(WAIT)
        yield step


def help_out(share: Share, rank: int, training: list[list[int]]) -> None:
    """The life of a process that only computes gradients."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    for _ in gradients(share, rank, training):
        pass


class Run:
    """A training run: the model, its running average (which is the result), the optimizer, and their saved state."""

    def __init__(self, options: argparse.Namespace, training: list[list[int]]) -> None:
        self.options, self.training, self.step = options, training, 0
        self.state_path = options.output.with_name(options.output.name + ".state")
        text = array("q", [id for ids in training for id in (END, *ids)]).tobytes()
        free = ("output", "resume", "overwrite", "save_every", "eval_every")
        self.settings = {name: str(value) for name, value in vars(options).items() if name not in free}
        self.settings["texts"] = f"{len(training)} documents, SHA-256 {hashlib.sha256(text).hexdigest()[:16]}"
        torch.manual_seed(options.seed)
        self.model = GPT2(options.config)
        if options.init:
            first = minigpt.load(options.init, device="cpu").model
            try:
                self.model.load_state_dict(first.state_dict())
            except RuntimeError:
                raise MiniGPTError(f"{options.init} has another shape: give its layers, width and context") from None
        self.model.train().share_memory()
        self.average = copy.deepcopy(self.model)
        groups = parameter_groups(self.model, options.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.99), fused=True)

    def save_state(self) -> None:
        """Atomically: an interruption leaves the old state or the new one."""
        partial = self.state_path.with_name(self.state_path.name + ".partial")
        state = {"settings": self.settings, "step": self.step, "model": self.model.state_dict()}
        state |= {"average": self.average.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, partial)
        os.replace(partial, self.state_path)

    def load_state(self) -> None:
        """Take up the saved state. Raises MiniGPTError if it is not of a run with these settings."""
        try:
            state = torch.load(self.state_path, weights_only=True)
        except FileNotFoundError:
            raise MiniGPTError(f"there is no {self.state_path} to resume from: leave out --resume") from None
        except Exception as error:  # whatever a damaged file makes torch.load raise
            raise MiniGPTError(f"{self.state_path} is damaged ({type(error).__name__}): delete it") from None
        for name, value in self.settings.items():
            if (was := state["settings"].get(name)) != value:
                flag = name.replace("_", "-")
                raise MiniGPTError(f"{self.state_path} is of a run with {flag} {was}: it cannot go on with {value}")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train(self, validation: list[list[int]]) -> int:
        """All the steps left. Returns 0, or 128 + the number of the signal that asked it to stop."""
        o, spawn = self.options, multiprocessing.get_context("spawn")
        parts = [[torch.zeros_like(p).share_memory_() for p in self.model.parameters()] for _ in range(o.workers)]
        losses = torch.zeros(o.workers).share_memory_()
        share = Share(self.model, parts, losses, spawn.Barrier(o.workers), o, self.step)
        helpers = [spawn.Process(target=help_out, args=(share, rank, self.training)) for rank in range(1, o.workers)]
        for helper in helpers:
            helper.daemon = True
            helper.start()
        asked: list[int] = []  # signals
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        before = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}  # nohup
        for n in before:
            signal.signal(n, lambda n, _: asked.append(n))
        tokens = o.batch * o.context
        bar = tqdm(total=o.steps * tokens, initial=self.step * tokens, unit="tok", unit_scale=True, mininterval=1)
        try:
            for step in gradients(share, 0, self.training):
                self.update(step, parts)
                bar.set_postfix(step=self.step, loss=f"{losses.sum():.3f}", refresh=False)
                bar.update(tokens)
                last = self.step == o.steps
                if self.step % o.eval_every == 0 or last:
                    loss = validation_loss(self.average, validation)
                    bar.write(f"step {self.step}: validation loss {loss:.4f}", sys.stderr)
                if self.step % o.save_every == 0 or last or asked:
                    self.save_state()
                if asked and not last:
                    return 128 + asked[0]
        finally:
            bar.close()
            for helper in helpers:
                helper.terminate()
            for n, handler in before.items():
                signal.signal(n, handler)
        return 0

    def update(self, step: int, parts: list[list[Tensor]]) -> None:
        """One step of AdamW with the summed gradients, clipped, and of the running average."""
        o = self.options
        for parameter, first, *more in zip(self.model.parameters(), *parts, strict=True):
            parameter.grad = sum(more, first)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), o.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, o.steps, o.warmup, o.rate, o.end_rate)
        self.optimizer.step()
        self.step = step + 1
        with torch.no_grad():
            for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - min(o.average, self.step / (self.step + 10)))


def at_least(low: float, kind: type = int) -> Any:
    """An argparse type: a number that is not below `low`."""

    def number(text: str) -> Any:
        if not low <= kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {low}, not {text}")
        return kind(text)

    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("train_demo.py", description=summary)
    add = parser.add_argument
    add("texts", nargs="+", type=Path, metavar="TEXT", help="UTF-8 text files, .xz too")
    add("--output", type=Path, required=True, help="folder for the finished model")
    add("--init", help="start from this model (a folder or a name), not from random numbers")
    add("--layers", type=at_least(1), default=6)
    add("--width", type=at_least(1), default=192)
    add("--heads", type=at_least(1), default=4)
    add("--context", type=at_least(1), default=256)
    add("--dropout", type=at_least(0, float), default=0.1)
    add("--steps", type=at_least(1), default=3000)
    add("--batch", type=at_least(1), default=16, help="rows of one context in a step")
    add("--rate", type=at_least(0, float), default=2e-3, help="highest learning rate")
    add("--end-rate", type=at_least(0, float), default=1e-4, help="learning rate at the end of the cosine")
    add("--warmup", type=at_least(0), default=100, help="steps")
    add("--weight-decay", type=at_least(0, float), default=0.1)
    add("--clip", type=at_least(0, float), default=1.0, help="largest norm of the gradient")
    add("--average", type=at_least(0, float), default=0.99, help="decay of the running average of the weights")
    add("--full-steps", type=at_least(0), default=100, help="last steps, with each token of the vocabulary on its own")
    add("--seed", type=at_least(0), default=0)
    add("--workers", type=at_least(1), default=min(2, os.cpu_count() or 1), help="processes of one thread each")
    add("--save-every", type=at_least(1), default=250, help="steps")
    add("--eval-every", type=at_least(1), default=500, help="steps")
    add("--resume", action="store_true", help="go on where an interrupted run's state ends")
    add("--overwrite", action="store_true", help="replace the model in OUTPUT, or start afresh despite a saved state")
    options = parser.parse_args(arguments)
    if options.workers > options.batch:
        parser.error(f"--workers ({options.workers}) must not exceed --batch ({options.batch})")
    try:  # no dropout in the attention: on a CPU it costs a third of the speed
        options.config = GPT2Config(
            n_positions=options.context,
            n_embd=options.width,
            n_layer=options.layers,
            n_head=options.heads,
            resid_pdrop=options.dropout,
            embd_pdrop=options.dropout,
            attn_pdrop=0.0,
        )
    except ValueError as error:
        parser.error(str(error))
    return options


def run(o: argparse.Namespace) -> int:
    """Checks first, so that nothing is found out after an hour; then trains and writes the model."""
    if not o.overwrite and any(path for name in ("config.json", "*.safetensors") for path in o.output.glob(name)):
        raise MiniGPTError(f"{o.output} already holds a model: choose another folder, or give --overwrite")
    training, validation = read(o.texts, o.context)
    current = Run(o, training)
    if o.resume:
        current.load_state()
    elif current.state_path.exists() and not o.overwrite:
        raise MiniGPTError(f"{current.state_path} is of an interrupted run: --resume goes on, --overwrite starts anew")
    else:
        o.output.parent.mkdir(parents=True, exist_ok=True)
        current.save_state()
    status = current.train(validation)
    if status:
        print(f"train_demo.py: stopped at step {current.step}: the same command with --resume goes on", file=sys.stderr)
        return status
    o.output.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=o.output, prefix=".saving-") as folder:  # what --overwrite replaces is kept until now
        minigpt.save(current.average.eval(), folder, dtype=torch.float16)
        for path in Path(folder).iterdir():
            os.replace(path, o.output / path.name)
    current.state_path.unlink()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)  # two processes of one thread are faster than one of two
    try:
        return run(options)
    except (MiniGPTError, BrokenBarrierError) as error:
        print(f"train_demo.py: error: {error or 'a helper process has died'}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"train_demo.py: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_demo.py: stopped before the first step: nothing was trained", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
