"""The official files, and the numbers that others have published for them: data/published.json, checked one by one.

Every entry names its source and its tolerance; the file says how both were chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from minigpt import scoring
from minigpt.checks import short_repr
from minigpt.decoding.params import SamplingParams
from minigpt.decoding.sampling import process
from minigpt.interpret.heads import without_heads
from minigpt.interpret.page import shipped
from minigpt.language_model import LanguageModel
from minigpt.network.model import Record
from minigpt.parity.check import Check, allowed_error, format_of, measured
from minigpt.text.tokenizer import Tokenizer

Entry = dict[str, Any]
# What a format may add to a tolerance stated for float32, as a fraction of the numbers' scale (for logits that are
# compared with each other: see `allowed_error`; 1 for probabilities). Measured on random weights in GPT-2's 124M
# layout: float16 2e-3, bfloat16 2e-2, int8 4.8e-2.
SLACK = {"float16": 4e-3, "bfloat16": 4e-2, "int8": 0.1}


def read() -> dict[str, Any]:
    """The data: "files" (official models by alias), "checks" and "tokenizer" (lists of entries with their sources)."""
    found: dict[str, Any] = json.loads(shipped("published.json"))
    return found


def identify(described: dict[str, Any], files: dict[str, Any], alias: str | None = None) -> tuple[str | None, Check]:
    """Which official model the weight files are, by sha256 (None: no official one), and the check that says so.

    described: what checkpoint.describe gives.      files: "files" of the data.
    alias: the official model that was asked for; the check fails if the files are not it.
    """
    hashes = [file["sha256"] for file in described["files"]]
    name = next((name for name, known in files.items() if hashes == [known["sha256"]]), None)
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in described["dtypes"].items())
    what = f"{described['tensors']} tensors ({dtypes}), {described['bytes']:,} bytes, sha256 {', '.join(hashes)}"
    if alias is not None and name != alias:
        return name, Check("file", "official", False, f"not the file of {alias}: {what}")
    if name is None:
        why = "not an official file (a copy in another format, a fine-tune)"
        return None, Check("file", "official", None, f"{why}: {what}")
    known = files[name]
    return name, Check("file", "official", True, f"the official {known['repo']} @ {known['revision'][:8]}: {what}")


def check_published(lm: LanguageModel, entries: list[Entry]) -> Iterator[Check]:
    """Check each entry, whose numbers must be about this very model."""
    for entry in entries:
        kind = entry["kind"]
        difference, tolerance, detail = KINDS[kind](lm, entry)
        figures = (difference, tolerance, f"{kind}{': ' if detail else ''}{detail}")
        yield measured(lm, "published", entry["id"], figures, source=entry["source"])


def check_tokenizer(tokenizer: Tokenizer | None, vectors: list[Entry]) -> Check:
    """Encode and decode each text. Skipped where the vocabulary is not GPT-2's."""
    gpt2 = Tokenizer.gpt2()
    if tokenizer is None:
        return Check("tokenizer", "vectors", None, "the model has no tokenizer")
    ids = range(gpt2.n_vocab)
    if not all(id in tokenizer and tokenizer.token_bytes(id) == gpt2.token_bytes(id) for id in ids):
        return Check("tokenizer", "vectors", None, "the model's vocabulary is not GPT-2's")
    wrong = [
        vector["text"]
        for vector in vectors
        if tokenizer.encode(vector["text"], special=vector.get("special", False)) != vector["ids"]
        or tokenizer.decode(vector["ids"]) != vector["text"]
    ]
    detail = f"{len(vectors) - len(wrong)} of {len(vectors)} texts encode and decode as published"
    return Check("tokenizer", "vectors", not wrong, f"{detail}; not {wrong[0]!r}" if wrong else detail)


# A kind takes the model and the entry, and gives the largest difference, the tolerance in this format, and what to say.
Outcome = tuple[float, float, str]


def _slack(lm: LanguageModel) -> float:
    """What the model's format adds to a tolerance: a fraction, see SLACK."""
    return SLACK.get(format_of(lm), 0.0)


def _between(lm: LanguageModel, logits: Tensor) -> float:
    """What the model's format adds to the tolerance of a difference between two logits."""
    return 2 * allowed_error(lm, logits, _slack(lm))


def _greedy(lm: LanguageModel, entry: Entry) -> Outcome:
    """The tokens of `generate`; where one differs, how far its logit is above the published one's, and so on."""
    prompt, ids, options = entry["prompt_ids"], entry["ids"], entry.get("options", {})
    text, tolerance, worst, done, ties = entry.get("text"), entry["tolerance"], 0.0, 0, []
    while done < len(ids) and worst <= tolerance:
        completion = lm.generate(prompt + ids[:done], max_new_tokens=len(ids) - done, stop_ids=(), **options)
        if completion.ids == ids[done:] or (not done and text and lm.limits.tokenizer and text in completion.text):
            break
        at = next((i for i, (a, b) in enumerate(zip(completion.ids, ids[done:], strict=False)) if a != b), None)
        if at is None:  # the context is too short for this entry
            return math.inf, tolerance, f"only {len(completion.ids)} tokens of {len(ids)}"
        done, ours = done + at, completion.ids[at]
        history, params = prompt + ids[:done], SamplingParams(**options)
        scores = process(_logits(lm, history)[-1], history, done, params, (), lm.limits.undecodable_ids)
        worst = max(worst, float(scores[ours] - scores[ids[done]]))
        tolerance = max(tolerance, entry["tolerance"] + _between(lm, scores))
        ties.append(f"token {done + 1} is {_name(lm, ours)}, published {_name(lm, ids[done])}")
        done += 1
    return worst, tolerance, f"{len(ids)} tokens, {ties[-1]}" if ties else f"{len(ids)} of {len(ids)} tokens"


def _beam_search(lm: LanguageModel, entry: Entry) -> Outcome:
    """The best sequence's score against the published one's; where the ids differ, against what those score here."""
    prompt, ids = entry["prompt_ids"], entry["ids"]
    best = lm.generate(prompt, max_new_tokens=len(ids), **entry["options"])
    score, published = best.score or -math.inf, entry.get("score")
    if best.ids != ids or published is None:
        published = math.fsum(scoring.log_probabilities(lm.model, prompt + ids)[len(prompt) - 1 :]) / len(ids)
    same = "the published ids" if best.ids == ids else f"ids {short_repr(best.ids)}, not the published ones"
    detail = f"{same}, score {score:.4f} beside {published:.4f}"
    return abs(score - published), entry["tolerance"] + _slack(lm) * abs(published), detail


def _name(lm: LanguageModel, id: int) -> str:
    return f"{id} {lm.tokenizer.decode([id])!r}" if lm.limits.tokenizer else str(id)


@torch.inference_mode()
def _logits(lm: LanguageModel, ids: list[int]) -> Tensor:
    """[T,V] float32 on the CPU."""
    logits: Tensor = lm.model(torch.tensor([ids], device=lm.device))
    return logits[0].float().cpu()


@torch.inference_mode()
def _record(lm: LanguageModel, ids: list[int]) -> tuple[Tensor, Record]:
    """Hidden states after ln_f [T,E] float32 on the CPU, and what the blocks did."""
    record = Record()
    hidden = lm.model.hidden(torch.tensor([ids], device=lm.device), record=record)
    return hidden[0].float().cpu(), record


def _argmax(lm: LanguageModel, entry: Entry) -> Outcome:
    """How far the best logit is above that of the published token."""
    zeroed = [lm.model.get_submodule(f"h.{entry['zero_mlp']}.mlp")] if "zero_mlp" in entry else []
    hooks = [mlp.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output)) for mlp in zeroed]
    try:
        logits = _logits(lm, entry["prompt_ids"])[-1]
    finally:
        for hook in hooks:
            hook.remove()
    (expected,) = entry["ids"]
    best = int(logits.argmax())
    detail = f"best is {_name(lm, best)}, published {_name(lm, expected)}"
    tolerance = entry["tolerance"] + _between(lm, logits)
    return float(logits[best] - logits[expected]), tolerance, detail


def _compared(lm: LanguageModel, entry: Entry, ours: Tensor, more: float, names: list[str] | None = None) -> Outcome:
    """The largest difference between our numbers and entry["values"] (flattened, in the same order).

    more: what the model's format adds to the tolerance.
    """
    theirs = _float64(list(_flat(entry["values"])))
    differences = (ours.double().flatten() - theirs).abs()
    at = int(differences.argmax())  # a NaN counts as the largest
    where = f" at {names[at]}" if names else ""
    detail = (
        f"{ours.flatten()[at]:.6g}, published {theirs[at]:.6g}{where}" if differences[at] > entry["tolerance"] else ""
    )
    return float(differences[at]), entry["tolerance"] + more, detail


def _float64(values: list[float]) -> Tensor:
    """On the CPU, whatever the host program's default device is."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _flat(values: Any) -> Iterator[float]:
    if isinstance(values, list):
        for value in values:
            yield from _flat(value)
    else:
        yield values


def _last_logits(figure: Callable[[Tensor, list[int]], Tensor], kind_of_number: str) -> Callable[..., Outcome]:
    """A kind whose numbers come from the logits after the last token: "logit", "difference" of two, "probability"."""

    def kind(lm: LanguageModel, entry: Entry) -> Outcome:
        logits = _logits(lm, entry["prompt_ids"])[-1]
        names = [_name(lm, id) for id in entry["ids"]] if len(entry["ids"]) == len(entry["values"]) else None
        if kind_of_number == "difference":
            more = _between(lm, logits)
        else:
            more = _slack(lm) * (1.0 if kind_of_number == "probability" else float(logits.abs().max()))
        return _compared(lm, entry, figure(logits, entry["ids"]), more, names)

    return kind


def _log_probabilities(lm: LanguageModel, entry: Entry) -> Outcome:
    """Of each token of prompt_ids from index `first` on, given those before it; or the sum of them."""
    ours = _float64(scoring.log_probabilities(lm.model, entry["prompt_ids"])[entry["first"] - 1 :])
    if entry["kind"] == "log-probability":
        ours = ours.sum(0, keepdim=True)
    return _compared(lm, entry, ours, _slack(lm) * float(ours.abs().max()))


def _loss(lm: LanguageModel, entry: Entry) -> Outcome:
    """Mean negative log-probability over all predictions of the rows."""
    model = without_heads(lm.model, entry["ablate"]) if "ablate" in entry else lm.model
    logprobs = [value for row in entry["rows"] for value in scoring.log_probabilities(model, row)]
    loss = -math.fsum(logprobs) / len(logprobs)
    return _compared(lm, entry, _float64([loss]), _slack(lm) * abs(loss))


def _hidden(lm: LanguageModel, entry: Entry) -> Outcome:
    """The first numbers of the hidden state after ln_f at one position."""
    hidden, _ = _record(lm, entry["prompt_ids"])
    ours = hidden[entry["position"], : len(entry["values"])]
    return _compared(lm, entry, ours, _slack(lm) * float(hidden.abs().max()))


def _final_scale(lm: LanguageModel, entry: Entry) -> Outcome:
    """What ln_f divides by at the last position: the standard deviation of the residual stream."""
    _, record = _record(lm, entry["prompt_ids"])
    last = record.residuals[-1][0, -1].double().cpu()
    ours = (last.var(unbiased=False) + lm.config.layer_norm_epsilon).sqrt()
    return _compared(lm, entry, ours, _slack(lm) * float(ours))


@torch.inference_mode()
def _logit_lens(lm: LanguageModel, entry: Entry) -> Outcome:
    """The residual stream at the last position (embeddings, then after each block) through ln_f and the head."""
    _, record = _record(lm, entry["prompt_ids"])
    stages = torch.stack([residual[0, -1] for residual in record.residuals])  # (L + 1, E)
    logits = lm.model.head(lm.model.ln_f(stages)).float().cpu()  # (L + 1, V)
    return _compared(lm, entry, logits[:, entry["ids"]].t(), _slack(lm) * float(logits.abs().max()))


def _attention(lm: LanguageModel, entry: Entry) -> Outcome:
    """The attention weights of some heads and queries, each over the tokens that the query sees."""
    _, record = _record(lm, entry["prompt_ids"])
    rows = [(layer, head, query) for layer, head in entry["heads"] for query in entry["queries"]]
    ours = [record.attentions[layer][0, head, query, : query + 1].float().cpu() for layer, head, query in rows]
    names = [f"L{layer}H{head} from {query} to {key}" for layer, head, query in rows for key in range(query + 1)]
    return _compared(lm, entry, torch.cat(ours), _slack(lm), names)


@torch.inference_mode()
def _bias_through_head(lm: LanguageModel, entry: Entry) -> Outcome:
    """The head applied to ln_f's bias, minus the mean over the vocabulary."""
    logits = lm.model.head(lm.model.ln_f.bias).float().cpu()
    return _compared(lm, entry, (logits - logits.mean())[entry["ids"]], _between(lm, logits))


KINDS: dict[str, Callable[[LanguageModel, Entry], Outcome]] = {
    "greedy": _greedy,
    "argmax": _argmax,
    "beam search": _beam_search,
    "logits": _last_logits(lambda logits, ids: logits[ids], "logit"),
    "logits minus their mean": _last_logits(lambda logits, ids: (logits - logits.mean())[ids], "difference"),
    "logit difference": _last_logits(lambda logits, ids: logits[ids[:1]] - logits[ids[1:]], "difference"),
    "probabilities": _last_logits(lambda logits, ids: logits.softmax(-1)[ids], "probability"),
    "log-probabilities": _log_probabilities,
    "log-probability": _log_probabilities,
    "loss": _loss,
    "hidden state": _hidden,
    "final scale": _final_scale,
    "logit lens": _logit_lens,
    "attention": _attention,
    "ln_f bias through the head": _bias_through_head,
}
