"""Beam search: the same ids and scores as transformers in this process, whatever shares the batch."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import from_hf, gpt2_folder, hf_model, save_hf
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import Completion, Failure, KVCache, LanguageModel, MiniGPTError, SamplingParams
from minigpt.cli.main import main
from minigpt.decoding.batch import Batch
from minigpt.jobs import records
from minigpt.lines import Line

VARIANTS: list[dict[str, Any]] = [
    {},
    {"vocab_size": 61},
    {"n_inner": 40},
    {"tie_word_embeddings": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True},
    {"scale_attn_weights": False},
    {"activation_function": "relu"},
    {"n_layer": 1, "n_head": 2, "vocab_size": 300},
    {"n_positions": 513},
]
PROCESSORS: list[dict[str, Any]] = [
    {},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    {"bad_words_ids": [[7], [50, 50], [59, 48, 50]], "suppress_tokens": [26, 13]},
    {"sequence_bias": [[[9], 1.5], [[50, 9], 3.0]], "min_new_tokens": 4},
]
BEAMS, PENALTIES, EARLY = (2, 3, 5), (0.0, 1.0, -1.0, 2.0), (False, True, "never")
ENDS = ("never", "early", "late", "two")


class Pair:
    """A model of transformers, and ours with the same weights."""

    def __init__(self, variant: int, seed: int = 0) -> None:
        self.hf: GPT2LMHeadModel = hf_model(variant + seed, **VARIANTS[variant])
        self.lm = LanguageModel(from_hf(self.hf))
        self.ties = 0

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 60, (length,), generator=generator).tolist()

    def ends(self, kind: str, prompt: list[int]) -> list[int]:
        """End ids that a search meets early, late or never; or two of them."""
        greedy = self.lm.generate(prompt, max_new_tokens=8, stop_ids=()).ids
        return {"never": [], "early": greedy[:1], "late": greedy[-1:], "two": [greedy[0], greedy[-1] ^ 1]}[kind]

    def theirs(self, prompt: list[int], seed: int = 0, **options: Any) -> list[tuple[list[int], float]]:
        """(drawn ids, score) of each sequence that transformers returns."""
        options = dict(options)
        end_ids, samples = options.pop("stop_ids"), options.pop("samples", 1)
        options["do_sample"] = options.get("temperature", 0) > 0
        if "sequence_bias" in options:
            options["sequence_bias"] = {tuple(ids): bias for ids, bias in options["sequence_bias"]}
        torch.manual_seed(seed)
        out = self.hf.generate(
            torch.tensor([prompt]), num_return_sequences=samples, eos_token_id=end_ids or None, pad_token_id=0,
            top_k=options.pop("top_k", 0), return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        found = []
        for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
            end = next((at + 1 for at, id in enumerate(row) if id in end_ids), len(row))
            found.append((row[:end], score))
        return found

    def check(self, prompt: list[int], seed: int = 0, ours: list[Completion] | None = None, **options: Any) -> None:
        """Ids and scores are equal. Where two sequences are all but equally good, either may be the one."""
        if ours is None:
            ours = self.lm.generate(
                [prompt], SamplingParams(seed=seed if "temperature" in options else None), **options
            )
        for completion, (ids, score) in zip(ours, self.theirs(prompt, seed, **options), strict=True):
            assert completion.score is not None
            # measured: 4e-7 of the score
            assert math.isclose(completion.score, score, rel_tol=4e-6, abs_tol=2e-5), (prompt, options)
            if completion.ids != ids:
                self.ties += 1
                print(f"a near tie: {completion.ids}, there {ids}, score {completion.score}, there {score}")
        assert self.ties <= 1


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(0)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_ids_and_scores_equal_transformers(variant: int) -> None:
    both = Pair(variant)
    for case in range(3):
        at = 3 * variant + case
        beams, new = BEAMS[case], (6, 27, 12)[case]  # 6 + 27 - 1: the whole context
        prompt = both.prompt(6, at)
        both.check(
            prompt, num_beams=beams, samples=(beams, 1, 2)[case], max_new_tokens=new, length_penalty=PENALTIES[at % 4],
            early_stopping=EARLY[(at // 2) % 3], stop_ids=both.ends(ENDS[(at + variant) % 4], prompt),
            **PROCESSORS[(variant + case) % 4],
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_the_whole_grid_equals_transformers(variant: int) -> None:
    """Every pair of beams, penalty and early stopping, with processors, ends and lengths in turn."""
    models = [Pair(variant, seed) for seed in (0, 100)]
    grid = itertools.product(BEAMS, PENALTIES, EARLY, ENDS)
    for at, (beams, penalty, early, end) in enumerate(grid):
        both = models[at % 2]
        prompt = both.prompt((1, 4, 9)[at % 3], at)
        both.check(
            prompt, num_beams=beams, samples=1 + at % beams, length_penalty=penalty, early_stopping=early,
            max_new_tokens=(1, 7, 15, 24)[(at // 5) % 4], stop_ids=both.ends(end, prompt), **PROCESSORS[(at // 3) % 4],
        )  # fmt: skip
    print(f"{sum(both.ties for both in models)} near ties in {at + 1} searches")


WARPERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 10},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05, "typical_p": 0.9},
    {"temperature": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "no_repeat_ngram_size": 2},
    {"temperature": 0.8, "top_k": 1},  # two tokens are left: there are fewer sequences than beams at first
]


@pytest.mark.parametrize("warpers", WARPERS)
def test_beam_sampling_draws_what_transformers_draws(warpers: dict[str, Any]) -> None:
    """From the prompt's own generator what torch's global one gives, seed for seed."""
    for variant in (0, 3):
        both = Pair(variant)
        for seed, beams in ((1, 2), (2, 3), (2**31, 5)):
            prompt = both.prompt(4, seed)
            ends = both.ends("late", prompt)
            both.check(prompt, seed, num_beams=beams, samples=2, max_new_tokens=10, stop_ids=ends, **warpers)


def test_every_sequence_has_the_prompts_seed_and_the_global_state_is_left_alone(pair: Pair) -> None:
    state = torch.get_rng_state()
    drawn = pair.lm.generate([5, 6], num_beams=4, samples=3, temperature=1.0, max_new_tokens=5)
    assert len({completion.seed for completion in drawn}) == 1 and drawn[0].seed is not None
    again = pair.lm.generate([5, 6], num_beams=4, samples=3, temperature=1.0, max_new_tokens=5, seed=drawn[0].seed)
    assert again == drawn and torch.equal(torch.get_rng_state(), state)
    assert pair.lm.generate([5, 6], num_beams=2, max_new_tokens=2).seed is None


def plain(completions: Any) -> list[tuple[list[int], str]]:
    return [(completion.ids, completion.finish_reason) for completion in completions]


def test_a_prompt_gives_in_a_batch_what_it_gives_alone(pair: Pair) -> None:
    prompts = [pair.prompt(length, length) for length in (1, 7, 3, 12, 2, 5)]
    params = [
        SamplingParams(num_beams=3, samples=2, max_new_tokens=9),
        SamplingParams(max_new_tokens=14),
        SamplingParams(num_beams=5, samples=5, max_new_tokens=4, length_penalty=2.0),
        SamplingParams(temperature=1.0, seed=3, samples=3, max_new_tokens=6),
        SamplingParams(num_beams=2, temperature=1.0, seed=4, max_new_tokens=8),
        SamplingParams(max_new_tokens=2),
    ]
    alone = [pair.lm.generate([prompt], one) for prompt, one in zip(prompts, params, strict=True)]
    scores = [completion.score for each in alone for completion in each]
    expected = plain(itertools.chain(*alone))
    for size in (1, 3, 4, 8):  # a batch smaller than the beams is made larger
        together = list(pair.lm.generate_many(prompts, params, batch_size=size))
        assert plain(together) == expected, size
        for completion, score in zip(together, scores, strict=True):
            assert completion.score == (None if score is None else pytest.approx(score, rel=1e-5))
        tasks = zip(prompts, params, strict=True)
        assert plain(pair.lm.generate_each(tasks, batch_size=size)) == expected, size
    for prompt, one in zip(prompts, params, strict=True):
        if one.num_beams > 1 and one.temperature == 0:
            mine = {"num_beams": one.num_beams, "samples": one.samples, "length_penalty": one.length_penalty}
            pair.check(prompt, max_new_tokens=one.max_new_tokens, stop_ids=[2], **mine)


def test_beams_share_a_prefill_and_copy_only_what_differs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefills, copied, steps = [], [], []
    prefill, copy_row, step = Batch.prefill, KVCache.copy_row, Batch.step

    def counted(batch: Batch, slot: int, ids: list[int]) -> torch.Tensor:
        prefills.append(len(ids))
        return prefill(batch, slot, ids)

    def checked(cache: KVCache, source: int, target: int, length: int, shared: int = 0) -> None:
        if shared or steps:
            for part in (cache.keys, cache.values):
                there, here = part[:, source, :, :length], part[:, target, :, :length]
                assert (there[:, :, :shared] - here[:, :, :shared]).abs().max() < 1e-5
                assert shared == length or (there[:, :, shared] - here[:, :, shared]).abs().max() > 1e-5
            copied.append(length - shared)
        copy_row(cache, source, target, length, shared)

    def stepped(batch: Batch) -> torch.Tensor:
        steps.append(len(batch.rows))
        return step(batch)

    monkeypatch.setattr(Batch, "prefill", counted)
    monkeypatch.setattr(KVCache, "copy_row", checked)
    monkeypatch.setattr(Batch, "step", stepped)
    pair.lm.generate(pair.prompt(20, 1), num_beams=5, max_new_tokens=12, stop_ids=())
    assert prefills == [20]
    assert steps == [5] * 11
    assert len(copied) > 3 and max(copied) <= 11  # never the prompt
    assert sum(copied) < 5 * sum(range(11)) / 2  # of what a copy of every beam would be


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_cache_of_a_search_takes_what_its_formula_says(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values: 2 x layers x rows x width x tokens x bytes, while it runs; the last token needs none."""
    caches, step = [], Batch.step

    def stepped(batch: Batch) -> Any:
        kept = (batch.cache.keys, batch.cache.values)
        caches.append((kept[0].element_size(), sum(each.untyped_storage().nbytes() for each in kept)))
        return step(batch)

    monkeypatch.setattr(Batch, "step", stepped)
    lm = LanguageModel(from_hf(hf_model()).to(dtype))
    for beams, rows, n_prompt, new, tokens in ((5, 1, 6, 10, 15), (2, 4, 6, 10, 15), (3, 3, 9, 99, 32)):
        caches.clear()
        params = SamplingParams(num_beams=beams, max_new_tokens=new, stop_ids=())
        list(lm.generate_many([[5] * n_prompt] * rows, params, batch_size=rows))
        size = {nbytes for _, nbytes in caches}
        assert size == {2 * 3 * max(beams, rows) * 24 * tokens * caches[0][0]}, (beams, rows, caches)


def test_a_search_that_fails_leaves_the_others_alone(pair: Pair) -> None:
    good = SamplingParams(num_beams=2, max_new_tokens=3)
    bad = SamplingParams(num_beams=3, samples=2, suppress_tokens=range(64))
    results = list(pair.lm.generate_each([([5], good), ([6], bad), ([7], good)], batch_size=8))
    assert [type(result) for result in results] == [Completion, Failure, Failure, Completion]
    assert "no token is left" in str(results[1].error) and results[1].started
    assert results[3] == pair.lm.generate([7], good)


def test_beams_that_have_no_token_left_end_while_others_go_on(pair: Pair) -> None:
    """transformers, too: -inf for every token after such a beam."""
    first = pair.lm.generate([3, 4, 5, 6], max_new_tokens=1, stop_ids=()).ids[0]
    words = [[first, other] for other in range(64)]
    pair.check([3, 4, 5, 6], num_beams=3, max_new_tokens=4, stop_ids=[], bad_words_ids=words)


@pytest.mark.parametrize("early", EARLY)
def test_what_is_complete_is_given_where_no_beam_can_go_on(pair: Pair, early: bool | str) -> None:
    """The likeliest token ends, and no token may follow another. transformers fills up with sequences at -1e9."""
    prompt = [3, 4, 5]
    [end] = pair.lm.generate(prompt, max_new_tokens=1, stop_ids=()).ids
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 4, "early_stopping": early, "stop_ids": [end]}
    options["bad_words_ids"] = [[one, other] for one in {*range(64)} - {*prompt, end} for other in range(64)]
    pair.check(prompt, **options)
    [first, second] = pair.lm.generate_each([(prompt, SamplingParams(samples=2, **options))])
    assert isinstance(first, Completion) and first.ids == [end]
    assert isinstance(second, Failure) and "before so many texts end" in str(second.error)


def test_no_sequence_is_given_twice_where_too_few_tokens_are_left(pair: Pair) -> None:
    """The beams that are all the same at first count for nothing in the end, either."""
    params = SamplingParams(num_beams=4, samples=4, max_new_tokens=1, suppress_tokens=range(2, 64), stop_ids=())
    found = list(pair.lm.generate_each([([3, 4, 5], params)]))
    assert sorted(one.ids for one in found if isinstance(one, Completion)) == [[0], [1]]
    assert [type(one) for one in found[2:]] == [Failure, Failure]
    assert len(pair.lm.generate([3, 4, 5], params, max_new_tokens=2)) == 4  # two tokens make four sequences


def test_damaged_weights_are_named() -> None:
    lm = LanguageModel(from_hf(hf_model()))
    lm.model.h[1].mlp.c_fc.bias.data[3] = math.nan
    with pytest.raises(MiniGPTError, match=r"not finite: h\.1\.mlp\.c_fc\.bias"):
        lm.generate([5, 6], num_beams=3, samples=2)


def test_log_probabilities_add_up_to_the_score(pair: Pair) -> None:
    for completion in pair.lm.generate([5, 6, 7], num_beams=4, samples=4, max_new_tokens=6, logprobs=2, stop_ids=()):
        logprobs = [entry.logprob for entry in completion.logprobs or ()]
        assert [entry.id for entry in completion.logprobs or ()] == completion.ids
        assert completion.score == pytest.approx(sum(logprobs) / 6, abs=1e-5)
        scored = pair.lm.score([5, 6, 7, *completion.ids], logprobs=2)
        assert logprobs == pytest.approx(scored.logprobs[2:], abs=1e-5)
        assert [[id for id, _ in entry.top] for entry in completion.logprobs or ()] == [
            [id for id, _ in top] for top in (scored.top or [])[2:]
        ]


def test_finish_reasons(pair: Pair) -> None:
    full = pair.lm.generate(pair.prompt(30), num_beams=3, max_new_tokens=50, stop_ids=())
    assert len(full.ids) == 3 and full.finish_reason == "context"
    late = pair.lm.generate([5], num_beams=3, samples=3, max_seconds=0, stop_ids=())
    assert [(len(one.ids), one.finish_reason) for one in late] == [(1, "time")] * 3
    ended = pair.lm.generate([5], num_beams=2, stop_ids=range(64))
    assert len(ended.ids) == 1 and ended.finish_reason == "stop"
    assert pair.lm.generate([5], num_beams=2, max_new_tokens=0).ids == []
    assert [one.finish_reason for one in pair.lm.generate([5], num_beams=2, samples=2, max_new_tokens=2)] == [
        "length"
    ] * 2


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return minigpt.load(gpt2_folder(tmp_path_factory.mktemp("gpt2")), device="cpu")


def test_stop_strings_end_a_beam(texts: LanguageModel) -> None:
    free = texts.generate("Hello there", num_beams=3, max_new_tokens=8)
    word = free.text[len(free.text) // 3 :][:3]  # begins inside a token
    stopped = texts.generate("Hello there", num_beams=3, samples=3, max_new_tokens=8, stop=word, length_penalty=-1.0)
    assert any(one.finish_reason == "stop" for one in stopped)
    for one in stopped:
        assert word not in one.text and len(one.ids) <= 8
        whole = texts.tokenizer.decode(one.ids)
        assert (word in whole) == (one.finish_reason == "stop")
        assert one.finish_reason == "length" or word not in texts.tokenizer.decode(one.ids[:-1])


def test_bad_words_are_barred_with_a_space_and_without(texts: LanguageModel) -> None:
    for beams in (1, 3):
        free = texts.generate("Hello there", num_beams=beams, max_new_tokens=6)
        words = [texts.tokenizer.decode([id]).strip() for id in free.ids]
        barred = [word for word in words if word.isalpha() and texts.tokenizer.encode(" " + word)[1:] == []][:2]
        assert barred
        held = texts.generate("Hello there", num_beams=beams, max_new_tokens=6, bad_words=barred)
        ids = [texts.tokenizer.encode(space + word) for word in barred for space in ("", " ")]
        assert held == texts.generate("Hello there", num_beams=beams, max_new_tokens=6, bad_words_ids=ids) != free
    with pytest.raises(minigpt.TokenizerError, match=r"bad_words need a tokenizer.*bad_words_ids"):
        LanguageModel(texts.model).generate([5], bad_words="no")


def test_what_does_not_go_together_is_said(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"samples 4 .* num_beams 3"):
        SamplingParams(num_beams=3, samples=4)
    with pytest.raises(ValueError, match="overflow slide is not for num_beams"):
        SamplingParams(num_beams=2, overflow="slide")
    with pytest.raises(ValueError, match=r"stream .*num_beams"):
        pair.lm.stream([5], SamplingParams(num_beams=2))
    found = list(pair.lm.stream_many([[5], ([6], SamplingParams(num_beams=2))], max_new_tokens=2))
    assert [number for number, _ in found].count(0) == 2
    [failure] = [step for number, step in found if number == 1]
    assert isinstance(failure, Failure) and "num_beams above 1 cannot be streamed" in str(failure.error)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_beams": 0}, "num_beams must be from 1 to 64, not 0"),
        ({"num_beams": 65}, "num_beams must be from 1 to 64, not 65"),
        ({"length_penalty": 11}, "length_penalty must be a finite number from -10 to 10, not 11"),
        ({"early_stopping": 1}, "early_stopping must be True or False or 'never', not 1"),
        ({"early_stopping": "always"}, "early_stopping must be True or False or 'never', not 'always'"),
        ({"typical_p": 0}, "typical_p must be above 0, not 0"),
        ({"typical_p": 1.5}, "typical_p must be a finite number from 0 to 1, not 1.5"),
        ({"epsilon_cutoff": 1.5}, "epsilon_cutoff must be a finite number from 0 to 1, not 1.5"),
        ({"eta_cutoff": -0.1}, "eta_cutoff must be a finite number from 0 to 1, not -0.1"),
        ({"bad_words": [""]}, "bad_words must be a non-empty string"),
        ({"bad_words_ids": [[]]}, "bad_words_ids must not hold an empty list"),
        ({"bad_words_ids": [5]}, "each item of bad_words_ids must be a list of token ids, not 5"),
        ({"bad_words_ids": 5}, "bad_words_ids must be a list of lists of token ids, not 5"),
        ({"sequence_bias": [[[], 1.0]]}, "sequence_bias must not hold an empty list"),
        ({"sequence_bias": [[[1], "x"]]}, "the bias in sequence_bias must be a finite number, not 'x'"),
        ({"sequence_bias": [[1, 2, 3]]}, "sequence_bias must be a list of .*pairs"),
        ({"sequence_bias": 1}, "sequence_bias must be a list of .*pairs"),
    ],
)
def test_values_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_ids_outside_the_vocabulary_are_named(pair: Pair) -> None:
    for options in ({"bad_words_ids": [[3, 64]]}, {"sequence_bias": {(64,): 1.0}}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} has token id 64, .* 64 ids"):
            pair.lm.generate([5], **options)


def test_params_are_hashable_and_the_same_from_json() -> None:
    params = SamplingParams(
        num_beams=3, early_stopping="never", bad_words="no", bad_words_ids=[[1, 2], (3,)], typical_p=0.5,
        sequence_bias={(4, 5): 1.5, (6,): -2}, epsilon_cutoff=0.1, eta_cutoff=0.1, length_penalty=-1,
    )  # fmt: skip
    assert params.sequence_bias == (((4, 5), 1.5), ((6,), -2.0)) and params.bad_words_ids == ((1, 2), (3,))
    again = SamplingParams(**json.loads(json.dumps(vars(params))))
    assert again == params and hash(again) == hash(params)


def test_a_job_has_a_record_for_each_sequence_of_a_search(pair: Pair) -> None:
    params = SamplingParams(num_beams=4, samples=3, temperature=1.0, seed=7, max_new_tokens=5)
    lines = [Line(1, 1, [5, 6], params), Line(2, 2, [7], SamplingParams(max_new_tokens=2))]
    search, greedy = records(pair.lm, lines, model="tiny")
    assert [record["sample"] for record in search] == [0, 1, 2] and None not in [record["score"] for record in search]
    assert [(record["sample"], record["score"]) for record in greedy] == [(0, None)]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = hf_model()
    folder = save_hf(model, tmp_path / "model")
    args = ["generate", "-m", str(folder), "--device", "cpu", "--ids", "-p", "5 6 7", "-n", "4", "--num-beams", "3"]
    expected = minigpt.load(folder, device="cpu").generate(
        [[5, 6, 7]], num_beams=3, samples=2, max_new_tokens=4, early_stopping=True, length_penalty=2.0
    )
    options = ["--samples", "2", "--early-stopping", "True", "--length-penalty", "2"]
    main([*args, *options, "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["ids"], one["score"]) for one in found] == [(one.ids, one.score) for one in expected]
    main([*args, *options])
    shown = capsys.readouterr().out.split("---\n")
    assert [[int(word) for word in text.split()] for text in shown] == [one.ids for one in expected]
    main(args)  # one sequence is not streamed
    assert len(capsys.readouterr().out.split()) == 4
    for wrong in (["--early-stopping", "1"], ["--samples", "4"], ["--overflow", "slide"], ["--num-beams", "0"]):
        assert main([*args, *wrong]) == 2 and "error:" in capsys.readouterr().err
