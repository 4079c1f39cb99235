"""The user's model compared with the same one in Hugging Face transformers: float32, the attention written out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.decoding.params import SamplingParams
from minigpt.decoding.sampling import process
from minigpt.errors import PromptError
from minigpt.language_model import LanguageModel
from minigpt.network.cache import KVCache
from minigpt.network.model import Record
from minigpt.parity.check import Check, allowed_error, format_of, measured, one_line, parting, shown, spread, tolerance
from minigpt.prompts import Text

PROMPTS = ("The meaning of life is", "def fibonacci(n):\n    if n < 2:\n", "Ünïcödé: 東京 🙂, don't   stop")
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
)
SEEDS = (0, 1)
NEW_TOKENS = 16
SHORT = 64  # tokens up to which every layer's output is compared: the memory for more would be gigabytes
Prompts = dict[str, list[int]]  # token ids by a name to show


def choose_prompts(lm: LanguageModel, given: Sequence[Text] = ()) -> Prompts:
    """The built-in prompts (random ids where there is no tokenizer), cut to the context, then those given.

    Raises PromptError for one that is empty or does not fit the context, and as `encode` does.
    """
    size, generator = lm.limits.n_positions, torch.Generator("cpu").manual_seed(0)
    known = sorted(set(range(lm.limits.vocab_size)) - set(lm.limits.undecodable_ids))

    def random(length: int) -> list[int]:
        drawn = torch.randint(len(known), (length,), generator=generator, device="cpu")
        return [known[at] for at in drawn.tolist()]

    if lm.limits.tokenizer is not None:
        chosen = {text: lm.encode(text)[:size] for text in PROMPTS}
    else:
        lengths = sorted({max(1, size * part // 100) for part in (5, 30, 60)})
        chosen = {f"{length} random ids": random(min(length, SHORT)) for length in lengths}
    chosen[f"the whole context, {size} random ids"] = random(size)
    for prompt in given:
        ids, name = lm.encode(prompt), prompt if isinstance(prompt, str) else f"the ids {list(prompt)}"
        if not 0 < len(ids) <= size:
            wanted = f"1 to {size} tokens, the model's context"
            raise PromptError(f"a prompt for parity has {wanted}, but {name[:50]!r} has {len(ids)}")
        chosen[name] = ids
    return chosen


@contextmanager
def quietly() -> Iterator[Any]:
    """transformers, with neither log nor bars. Raises ImportError with a sentence for the user."""
    try:
        transformers: Any = import_module("transformers")
        log, _ = transformers.logging, transformers.GPT2LMHeadModel  # which imports much more
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise ImportError("transformers is not installed (pip install transformers)") from None
        raise ImportError(f"transformers cannot be imported: {one_line(error)}") from None
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield transformers
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def load_reference(folder: Path, lm: LanguageModel) -> Any:
    """The model in `folder` as transformers loads it, in float32 on lm's device; or a skipped Check that says why."""
    skipped = partial(Check, "transformers", "all", None)
    options = {"local_files_only": True, "output_loading_info": True, "use_safetensors": True}  # never a pickle
    try:
        with quietly() as transformers, torch.device("cpu"):  # whatever the host program's default is
            load = transformers.GPT2LMHeadModel.from_pretrained
            model, info = load(folder, attn_implementation="eager", **options)
    except ImportError as error:
        return skipped(one_line(error))
    except Exception as error:  # whatever transformers does not read, minigpt has no reference for
        return skipped(f"transformers cannot load the model: {one_line(error)}")
    missing = sorted(set(info["missing_keys"]) - {"lm_head.weight"})  # which is wte, where it is not stored
    if missing:  # names that minigpt knows and transformers does not: it would go on with random weights
        return skipped(f"transformers does not find {missing[0]} and others in the model")
    # Only what is asked for, whatever generation_config.json says, and the same end ids.
    ends = list(lm.limits.end_ids) or None
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=0)
    return model.float().to(lm.device).eval()


def compare(lm: LanguageModel, reference: Any, prompts: Prompts) -> Iterator[Check]:
    """Compare with a GPT2LMHeadModel of transformers in float32: every layer, attention, logits, ids."""
    short = {name: ids[:SHORT] for name, ids in prompts.items()}
    first_wrong = {}
    for name, ids in short.items():
        layers = _compare_layers(lm, reference, name, ids)
        first_wrong[name] = "" if layers.passed else layers.detail
        yield layers
        yield _compare_attention(lm, reference, name, ids)
    for name, ids in prompts.items():
        yield _compare_logits(lm, reference, name, ids, first_wrong[name])
    room = {name: ids for name, ids in short.items() if len(ids) < lm.limits.n_positions}
    for setting in SETTINGS if room else ():
        yield compare_ids(lm, reference, room, setting)


def largest(values: Iterable[float]) -> float:
    """The largest; NaN where one is, which max() may pass over; 0 of none."""
    found = [0.0, *values]
    return max(found) if not any(map(math.isnan, found)) else math.nan


def hidden_states(lm: LanguageModel, ids: list[int]) -> Tensor:
    """[T,E] of a text through a cache, of a short one in two parts: the layers are compared without."""
    cut, weight = len(ids) // 2 if len(ids) <= SHORT else 0, lm.model.wte.weight
    cache = KVCache(lm.config, 1, len(ids), device=weight.device, dtype=weight.dtype)
    parts = [torch.tensor([part], device=lm.device) for part in (ids[:cut], ids[cut:]) if part]
    return torch.cat([lm.model.hidden(part, cache)[0] for part in parts])


@torch.inference_mode()
def _compare_logits(lm: LanguageModel, reference: Any, name: str, ids: list[int], first_wrong: str) -> Check:
    """Largest and mean difference over all positions, 64 of them at a time: V is large."""
    batch = torch.tensor([ids], device=lm.device)
    ours = hidden_states(lm, ids)
    theirs: Tensor = reference.transformer(batch).last_hidden_state[0]
    worst, total, scale, allowed = 0.0, 0.0, 0.0, 0.0
    for rows, wanted in zip(torch.split(ours, 64), torch.split(theirs, 64), strict=True):
        logits = reference.lm_head(wanted)
        difference = (lm.model.head(rows).float() - logits).abs()
        worst = largest([worst, float(difference.max())])
        total += float(difference.sum())
        scale = max(scale, spread(logits))
        allowed = max(allowed, allowed_error(lm, logits, tolerance(lm, "logits")))
    mean = total / (len(ids) * lm.config.vocab_size)
    detail = f"mean {mean:.1e}, logits up to {scale:.1f} from their mean, {len(ids)} positions"
    detail += f"; a layer {first_wrong}" if first_wrong else ""
    return measured(lm, "transformers", f"logits of {shown(name)}", (worst, allowed, detail))


@torch.inference_mode()
def _compare_layers(lm: LanguageModel, reference: Any, name: str, ids: list[int]) -> Check:
    """The output of every module, in the order in which they run: the first that differs is where the cause is."""
    batch = torch.tensor([ids], device=lm.device)
    ours = outputs(lm.model, lambda: lm.model.hidden(batch, record=Record()))
    theirs = outputs(reference.transformer, lambda: reference.transformer(batch))
    differences = {module: math.inf for module in theirs.keys() - ours.keys()}  # which does not run here
    for module, output in ours.items():
        expected = theirs[module].reshape(output.shape)
        lengths = expected.norm(dim=-1).clamp_min(1e-6)
        differences[module] = float(((output - expected).norm(dim=-1) / lengths).max())
    return check_layers(lm, "transformers", name, differences, tolerance(lm, "layers"))


def check_layers(lm: LanguageModel, group: str, name: str, differences: dict[str, float], allowed: float) -> Check:
    """The verdict on each module's difference, a fraction of its output's length; they are in the order of the run."""
    first = next((module for module, value in differences.items() if not value <= allowed), None)
    detail = f"largest at {max(differences, key=lambda module: differences[module])}"
    if first:
        detail = f"first differs at {first}, by {differences[first]:.1e} of its length"
    blocks = [f"h.{layer}." for layer in range(lm.config.n_layer)]
    layers = [largest(value for name, value in differences.items() if f"{name}.".startswith(at)) for at in blocks]
    figures = (largest(differences.values()), allowed, detail)
    return measured(lm, group, f"layers of {shown(name)}", figures, layers=layers)


def outputs(model: torch.nn.Module, forward: Any) -> dict[str, Tensor]:
    """What each block, and each module with parameters of its own, gives during `forward`: [T, width] in float32."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: Any, inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        found[name] = output.float().reshape(-1, output.shape[-1])

    hooks = [
        module.register_forward_hook(partial(keep, name))
        for name, module in model.named_modules()
        if name and (name.count(".") == 1 or any(True for _ in module.parameters(recurse=False)))
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.inference_mode()
def _compare_attention(lm: LanguageModel, reference: Any, name: str, ids: list[int]) -> Check:
    """The attention weights of every head of every block."""
    batch, record = torch.tensor([ids], device=lm.device), Record()
    lm.model.hidden(batch, record=record)
    theirs = reference.transformer(batch, output_attentions=True).attentions
    differences = [(ours.float() - theirs[layer]).abs().amax((0, 2, 3)) for layer, ours in enumerate(record.attentions)]
    layers = [float(heads.max()) for heads in differences]
    allowed = tolerance(lm, "attention")
    layer = next((at for at, worst in enumerate(layers) if not worst <= allowed), layers.index(max(layers)))
    head = int(differences[layer].argmax())
    detail = f"{'first differs' if not layers[layer] <= allowed else 'largest'} at L{layer}H{head}"
    figures = (largest(layers), allowed, detail)
    return measured(lm, "transformers", f"attention of {shown(name)}", figures, layers=layers)


def compare_ids(lm: LanguageModel, reference: Any, prompts: Prompts, setting: dict[str, Any]) -> Check:
    """The ids of all prompts in one batch here, of each alone there; for each seed, if the setting samples."""
    kind = "sampled" if setting.get("temperature") else "greedy"
    name = " ".join([kind, *(f"{key}={value}" for key, value in setting.items())])
    dtype = format_of(lm)
    if kind != "greedy" and (lm.device.type != "cpu" or dtype != "float32"):
        why = "only float32 on the CPU draws what transformers draws"
        return Check("transformers", name, None, why, dtype=dtype, applies=False)
    runs = [(seed, *item) for seed in (SEEDS if kind != "greedy" else (None,)) for item in prompts.items()]
    new = [min(NEW_TOKENS, lm.limits.n_positions - len(ids)) for _, _, ids in runs]
    each = [SamplingParams(**setting, seed=seed, max_new_tokens=n) for (seed, _, _), n in zip(runs, new, strict=True)]
    completions = lm.generate_many([ids for _, _, ids in runs], each)
    tokens, ties, worst, most, detail = 0, 0, 0.0, 0.0, ""
    for (_, prompt, ids), params, completion in zip(runs, each, completions, strict=True):
        tokens += len(expected := reference_ids(lm, reference, ids, params))
        if (at := parting(completion.ids, expected)) is None:
            continue
        gap, allowed, margin = _gap(lm, reference, ids + expected[:at], at, params, completion.ids[at:], expected[at:])
        ties += 1
        if worst - most <= gap - allowed:  # the one that is most wrong
            worst, most = gap, allowed
            seed = "" if params.seed is None else f", seed {params.seed}"
            drew = f"{completion.ids[at : at + 1]}, not {expected[at : at + 1]}, top-2 margin {margin:.2g}"
            detail = f"; first differs at token {at + 1} of {shown(prompt)}{seed}: {drew}"
    detail = f"{len(runs) - ties} of {len(runs)} runs equal, {tokens} tokens{detail}"
    return measured(lm, "transformers", name, (worst, most, detail))


def reference_ids(lm: LanguageModel, reference: Any, ids: list[int], params: SamplingParams) -> list[int]:
    """What transformers draws after `ids` for the same parameters. The global random state is put back."""
    names = ["max_new_tokens", "repetition_penalty", "no_repeat_ngram_size"]
    names += ["temperature", "top_k", "top_p"] if params.temperature > 0 else []
    options: dict[str, Any] = {name: getattr(params, name) for name in names}
    options |= {"do_sample": params.temperature > 0, "min_p": params.min_p or None}
    options["suppress_tokens"] = list(lm.limits.undecodable_ids) or None
    inputs = torch.tensor([ids], device=lm.device)
    with torch.random.fork_rng(devices=[]):
        if params.temperature > 0:
            torch.default_generator.manual_seed(params.seed or 0)  # not those of CUDA: they are not put back
        out = reference.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    drawn: list[int] = out[0, len(ids) :].tolist()
    return drawn


@torch.inference_mode()
def _gap(
    lm: LanguageModel, reference: Any, history: list[int], drawn: int, params: SamplingParams, *tokens: list[int]
) -> tuple[float, float, float]:
    """Where the ids part: how far the worse of the two tokens is below the best by transformers' logits, what is
    allowed, and the margin between its two best."""
    logits = reference(torch.tensor([history], device=lm.device)).logits[0, -1].cpu()
    scores = race(lm, logits, history, drawn, params)
    # From all logits: those that top_p leaves may lie close together.
    allowed = 2 * allowed_error(lm, logits, tolerance(lm, "logits")) / (params.temperature or 1.0)
    best, second = scores.topk(2).values.tolist()
    ours, theirs = (token[0] if token else -1 for token in tokens)
    if min(ours, theirs) < 0:  # one of them stopped early
        return math.inf, allowed, best - second
    return best - min(float(scores[ours]), float(scores[theirs])), allowed, best - second


def race(lm: LanguageModel, logits: Tensor, history: list[int], drawn: int, params: SamplingParams) -> Tensor:
    """What the next token has most of, [V]: the processed logit if greedy; if sampled log(P/q), for the draw's q."""
    scores = process(logits, history, drawn, params, lm.limits.end_ids, lm.limits.undecodable_ids)
    if params.temperature > 0:
        generator = torch.Generator("cpu").manual_seed(params.seed or 0)
        for _ in range(drawn + 1):
            q = torch.empty_like(scores).exponential_(1, generator=generator)
        scores = scores.log_softmax(-1) - q.log()
    return scores
