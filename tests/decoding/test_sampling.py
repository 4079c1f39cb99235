"""Every filter, whole chains and the draw: bit for bit what transformers gives on the same logits; then our own."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.generation import logits_process as hf

from minigpt.decoding import sampling
from minigpt.decoding.params import SamplingParams
from minigpt.errors import CheckpointError, MiniGPTError

INF = math.inf
VOCAB = 50257


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These are thousands of tiny operations, and on shared cores each waits for the second thread to wake up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_logits(size: int, seed: int, kind: str) -> Tensor:
    """Logits of every shape a model gives: smooth, with ties, flat, peaked, huge, tiny."""
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return {
        "smooth": 3 * noise - 30,
        "ties": (2 * noise).round() / 2,
        "flat": torch.full((size,), 0.25),
        "peaked": 40 * noise,
        "huge": 1e36 * noise,
        "tiny": 1e-40 * noise,
    }[kind]


KINDS = ("smooth", "ties", "flat", "peaked", "huge", "tiny")
SIZES = (1, 2, 5, 17, 300, VOCAB)
SHARED = [(size, kind) for size in SIZES for kind in KINDS]


def reference(processor: hf.LogitsProcessor, logits: Tensor, ids: list[int] | None = None) -> Tensor:
    """What a transformers processor gives for one row. It modifies some inputs, so it gets a copy."""
    return processor(torch.tensor([ids or [0]]), logits.clone()[None])[0]


def kept(logits: Tensor) -> set[int]:
    return set((logits > -INF).nonzero()[:, 0].tolist())


def history_of(size: int, length: int, seed: int = 0) -> list[int]:
    """Ids with many repeats, from few distinct values, so that n-grams of up to four come twice."""
    return torch.randint(0, min(size, 4), (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Each filter, against the class it copies.


@pytest.mark.parametrize("size, kind", SHARED)
def test_filters_equal_transformers(size: int, kind: str) -> None:
    logits = make_logits(size, 1, kind)
    before = logits.clone()
    for t in (0.7, 1.0, 1.7, 1e-3):
        expected = reference(hf.TemperatureLogitsWarper(t), logits)
        if expected.isfinite().all():
            assert torch.equal(sampling.scale_temperature(logits, t), expected), t
    for k in (1, 2, 50, 5000, size, size + 1, 100_000):
        assert torch.equal(sampling.keep_top_k(logits, k), reference(hf.TopKLogitsWarper(k), logits)), k
    for p in (0.0, 1e-8, 1e-4, 0.1, 0.5, 0.9, 0.95, 0.999999):  # generate() leaves the class out at 1.0
        assert torch.equal(sampling.keep_top_p(logits, p), reference(hf.TopPLogitsWarper(p), logits)), p
    for m in (0.0, 1e-6, 0.05, 0.5, 1.0):
        assert torch.equal(sampling.keep_min_p(logits, m), reference(hf.MinPLogitsWarper(m), logits)), m
    for length in (1, 2, 3, 40, 1024):
        ids = history_of(size, length)
        for penalty in (0.5, 1.0, 1.3, 5.0):
            expected = reference(hf.RepetitionPenaltyLogitsProcessor(penalty), logits, ids)
            assert torch.equal(sampling.penalise_repetition(logits, ids, penalty), expected), (length, penalty)
        for n in (1, 2, 3, 5, 1024, 2000):
            expected = reference(hf.NoRepeatNGramLogitsProcessor(n), logits, ids)
            assert torch.equal(sampling.ban_repeated_ngrams(logits, ids, n), expected), (length, n)
    ids = sorted({0, size // 2, size - 1})
    expected = reference(hf.SuppressTokensLogitsProcessor([*ids, size, 10**9]), logits)
    assert torch.equal(sampling.suppress(logits, [*ids, size, 10**9]), expected)
    for p in (1e-6, 0.1, 0.5, 0.9, 0.999):
        assert torch.equal(sampling.keep_typical(logits, p), reference(hf.TypicalLogitsWarper(p), logits)), p
        assert torch.equal(sampling.drop_below(logits, p), reference(hf.EpsilonLogitsWarper(p), logits)), p
        actual = sampling.drop_below(logits, sampling.eta_bound(logits, p))
        assert torch.equal(actual, reference(hf.EtaLogitsWarper(p), logits)), p
    assert torch.equal(logits, before)  # nothing was modified in place


@pytest.mark.parametrize("size, kind", [(size, kind) for size, kind in SHARED if size < VOCAB])
def test_biases_of_sequences_and_bad_words_equal_transformers(size: int, kind: str) -> None:
    """Sums are rounded, so the order of what is added to one id counts."""
    random, logits = Random(size), make_logits(size, 1, kind)
    for _ in range(20):
        few = range(min(size, 3))
        history = random.choices(few, k=random.randint(1, 9))
        bias = {tuple(random.choices(few, k=random.randint(1, 4))): random.uniform(-9, 9) for _ in range(12)}
        expected = reference(hf.SequenceBiasLogitsProcessor(bias), logits, history)
        assert torch.equal(sampling.add_bias(logits, history, list(bias.items())), expected), (history, bias)
        words, n_new = [list(ids) for ids in bias], len(history)
        expected = reference(hf.NoBadWordsLogitsProcessor(words, [0]), logits, history)
        if (expected > -INF).any():
            params = SamplingParams(bad_words_ids=words)
            assert torch.equal(sampling.process(logits, history, n_new, params, [0]), expected), (history, words)


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_filters_of_beams_keep_as_many_as_transformers(keep: int) -> None:
    """A beam needs a token more than there are end ids (min_tokens_to_keep)."""
    for size, kind in [(2, "smooth"), *((300, kind) for kind in KINDS)]:
        logits = make_logits(size, 2, kind)
        for x in (1e-5, 0.02, 0.3, 0.9):
            for actual, processor in (
                (sampling.keep_top_p(logits, x, keep), hf.TopPLogitsWarper),
                (sampling.keep_min_p(logits, x, keep), hf.MinPLogitsWarper),
                (sampling.keep_typical(logits, x, keep), hf.TypicalLogitsWarper),
                (sampling.drop_below(logits, x, keep), hf.EpsilonLogitsWarper),
                (sampling.drop_below(logits, sampling.eta_bound(logits, x), keep), hf.EtaLogitsWarper),
            ):
                assert torch.equal(actual, reference(processor(x, min_tokens_to_keep=keep), logits)), (kind, x)


def test_filters_equal_transformers_where_tokens_are_barred() -> None:
    logits = sampling.keep_top_k(make_logits(VOCAB, 2, "ties"), 40)
    for x in (0.01, 0.2, 0.7, 0.95):
        assert torch.equal(sampling.keep_typical(logits, x), reference(hf.TypicalLogitsWarper(x), logits))
        actual = sampling.drop_below(logits, sampling.eta_bound(logits, x))
        assert torch.equal(actual, reference(hf.EtaLogitsWarper(x), logits))


def test_bad_words_bar_what_completes_them_and_no_end_id() -> None:
    params = SamplingParams(bad_words_ids=[[1], [2], [3, 4], [5, 6, 0]])
    for history, barred in (([0], {2}), ([3], {2, 4}), ([5, 6], {2, 0}), ([6], {2}), ([4, 3], {2, 4})):
        assert kept(sampling.process(torch.zeros(7), history, 0, params, end_ids=[1])) == set(range(7)) - barred


def test_top_p_equals_transformers_after_top_k() -> None:
    """Most logits are -inf by then, and they are left out of the fast sort."""
    for kind in KINDS:
        logits = sampling.keep_top_k(make_logits(VOCAB, 2, kind), 50)
        for p in (0.0, 0.3, 0.9, 0.99):
            assert torch.equal(sampling.keep_top_p(logits, p), reference(hf.TopPLogitsWarper(p), logits)), (kind, p)


def test_top_p_with_signed_zeros_at_the_cut() -> None:
    """-0.0 and 0.0 are one logit, although their bits, which the fast sort orders by, differ."""
    logits = torch.tensor([0.0, -0.0] * 20 + [1.0])
    for p in (0.2, 0.5, 0.7):
        assert torch.equal(sampling.keep_top_p(logits, p), reference(hf.TopPLogitsWarper(p), logits)), p


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.floats(0, 1, exclude_max=True)
)
def test_filters_equal_transformers_on_any_logits(values: list[float], x: float) -> None:
    logits = torch.tensor(values)
    assert torch.equal(sampling._sort_values(logits), logits.sort().values)
    assert torch.equal(sampling.keep_top_p(logits, x), reference(hf.TopPLogitsWarper(x), logits))
    assert torch.equal(sampling.keep_min_p(logits, x), reference(hf.MinPLogitsWarper(x), logits))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_filters_on_cuda_equal_transformers() -> None:
    for kind in ("smooth", "ties", "peaked"):
        logits = make_logits(VOCAB, 1, kind).cuda()
        for p in (0.0, 0.5, 0.95):
            assert torch.equal(sampling.keep_top_p(logits, p), reference(hf.TopPLogitsWarper(p), logits)), (kind, p)
        params = SamplingParams(
            temperature=0.8, top_k=500, top_p=0.95, min_p=1e-3, repetition_penalty=1.2, no_repeat_ngram_size=2,
            logit_bias={5: 1.5}, suppress_tokens=(7,), min_new_tokens=3,
        )  # fmt: skip
        on_cpu = sampling.process(logits.cpu(), [5, 6, 5], 0, params, (9,))
        on_cuda = sampling.process(logits, [5, 6, 5], 0, params, (9,))
        # The two divide and add probabilities differently, so only a token at the very edge may change sides.
        assert on_cuda.is_cuda and len(kept(on_cuda.cpu()) ^ kept(on_cpu)) <= 1
        generator = torch.Generator("cuda").manual_seed(3)
        assert sampling.draw(on_cuda, params, generator) in kept(on_cuda.cpu())


# Whole chains, against the list that generate() itself builds.


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=2, n_head=1, n_layer=1, n_positions=4))


def chain(model: GPT2LMHeadModel, params: SamplingParams, n_prompt: int, end_ids: list[int]) -> hf.LogitsProcessorList:
    """The processors that model.generate() would run, in its order."""
    config = GenerationConfig(
        do_sample=params.temperature > 0,
        temperature=params.temperature or None,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        typical_p=params.typical_p,
        epsilon_cutoff=params.epsilon_cutoff,
        eta_cutoff=params.eta_cutoff,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        min_new_tokens=params.min_new_tokens,
        sequence_bias={(token,): value for token, value in params.logit_bias.items()} | dict(params.sequence_bias)
        or None,
        bad_words_ids=[list(ids) for ids in params.bad_words_ids] or None,
        suppress_tokens=list(params.suppress_tokens) or None,
    )
    config._eos_token_tensor = torch.tensor(end_ids)
    return model._get_logits_processor(config, input_ids_seq_length=n_prompt, device="cpu")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_chains_equal_transformers(model: GPT2LMHeadModel, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((6, 7, 100, 3000)), "V")
    token, few = st.integers(0, size - 1), st.integers(0, 3)
    logits = make_logits(size, data.draw(st.integers(0, 99)), data.draw(st.sampled_from(KINDS[:4])))
    history = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    n_new = data.draw(st.integers(0, len(history) - 1), "n_new")
    params = SamplingParams(
        temperature=data.draw(st.sampled_from((0.0, 0.5, 1.0, 1.3))),
        top_k=data.draw(st.sampled_from((0, 1, 2, 40, 5000))),
        top_p=data.draw(st.sampled_from((0.0, 0.3, 0.9, 0.99, 1.0))),
        min_p=data.draw(st.sampled_from((0.0, 0.01, 0.5))),
        typical_p=data.draw(st.sampled_from((0.2, 0.9, 1.0))),
        epsilon_cutoff=data.draw(st.sampled_from((0.0, 3e-3, 0.2))),
        eta_cutoff=data.draw(st.sampled_from((0.0, 3e-3, 0.2))),
        repetition_penalty=data.draw(st.sampled_from((0.8, 1.0, 1.2))),
        no_repeat_ngram_size=data.draw(st.integers(0, 4)),
        min_new_tokens=data.draw(st.integers(0, 3)),
        logit_bias=data.draw(st.dictionaries(token, st.floats(-9, 9, width=32), max_size=3)),
        sequence_bias=data.draw(st.dictionaries(st.tuples(few, few), st.floats(-9, 9, width=32), max_size=3)),
        bad_words_ids=data.draw(st.lists(st.lists(few, min_size=2, max_size=3), max_size=2)),
        suppress_tokens=tuple(data.draw(st.lists(token.filter(lambda token: token != 5), max_size=2))),
    )
    end_ids = data.draw(st.sampled_from(([4], [4, 1], [4, size])))
    processors = chain(model, params, len(history) - n_new, end_ids)
    expected = processors(torch.tensor([history]), logits.clone()[None])[0]
    actual = sampling.process(logits, history, n_new, params, end_ids)
    assert torch.equal(actual, expected)

    seed = data.draw(st.integers(0, 2**64 - 1))
    if params.temperature == 0:
        assert sampling.draw(actual, params) == int(expected[None].argmax(-1))
    else:
        torch.manual_seed(seed)
        token_of_hf = int(torch.multinomial(expected[None].softmax(-1), num_samples=1))
        assert sampling.draw(actual, params, torch.Generator().manual_seed(seed)) == token_of_hf


def test_a_whole_vocabulary_through_the_chain_step_by_step(model: GPT2LMHeadModel) -> None:
    """Twenty draws in a row from one generator each: the random streams stay together."""
    params = SamplingParams(
        temperature=0.9, top_k=400, top_p=0.95, min_p=1e-4, repetition_penalty=1.2, no_repeat_ngram_size=2,
        min_new_tokens=5, logit_bias={11: 4.0, 50256: 3.0}, suppress_tokens=(13,),
    )  # fmt: skip
    history = [11, 12, 11]
    processors = chain(model, params, 3, [50256])
    expected = torch.tensor([history])
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    for step in range(20):
        logits = make_logits(VOCAB, step, "peaked") / 10
        scores = processors(expected, logits.clone()[None])
        expected = torch.cat([expected, torch.multinomial(scores.softmax(-1), 1)], dim=1)
        ours = sampling.process(logits, history, step, params, {50256})
        assert torch.equal(ours, scores[0])
        history.append(sampling.draw(ours, params, generator))
    assert history == expected[0].tolist()


def test_off_values_change_nothing() -> None:
    logits = make_logits(300, 3, "ties")
    assert torch.equal(sampling.process(logits, [1, 2, 1], 2, SamplingParams()), logits)
    assert torch.equal(sampling.process(logits, [1, 2, 1], 2, SamplingParams(temperature=1.0)), logits)


def test_half_precision_logits_are_widened_first() -> None:
    logits = make_logits(300, 3, "smooth").half()
    params = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3)
    actual = sampling.process(logits, [1, 2], 1, params)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, sampling.process(logits.float(), [1, 2], 1, params))


# By hand.


@pytest.mark.parametrize(
    "probabilities, p, expected",
    [
        ([0.3, 0.1, 0.1, 0.5], 0.8, {0, 3}),  # one token too many was kept when the sum is exactly p
        ([0.15, 0.3, 0.3, 0.25], 0.8, {1, 2, 3}),
        ([0.3, 0.1, 0.1, 0.4, 0.1], 0.0, {3}),  # everything was removed
        ([0.3, 0.1, 0.1, 0.4, 0.1], 1e-8, {3}),
        ([0.3, 0.1, 0.1, 0.4, 0.1], 0.5, {0, 3}),
        ([0.3, 0.1, 0.1, 0.4, 0.1], 1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_by_hand(probabilities: list[float], p: float, expected: set[int]) -> None:
    assert kept(sampling.keep_top_p(torch.tensor(probabilities).log(), p)) == expected


@pytest.mark.parametrize("p", [0.0, 1e-8, 1e-4])
def test_a_tiny_top_p_keeps_exactly_the_best(p: float) -> None:
    logits = make_logits(VOCAB, 5, "smooth")
    assert kept(sampling.keep_top_p(logits, p)) == {int(logits.argmax())}


@pytest.mark.parametrize("k, count", [(0, 5), (1, 1), (2, 3), (3, 3), (4, 4), (5, 5), (100_000, 5)])
def test_top_k_by_hand(k: int, count: int) -> None:
    """k beyond the vocabulary was an error elsewhere; ties with the k-th value all stay."""
    assert len(kept(sampling.keep_top_k(torch.tensor([1.0, 3.0, 2.0, 2.0, -1.0]), k))) == count


def test_min_p_by_hand() -> None:
    logits = torch.tensor([0.5, 0.24, 0.26, 0.5, 0.01]).log()
    assert kept(sampling.keep_min_p(logits, 0.5)) == {0, 2, 3}
    assert kept(sampling.keep_min_p(logits, 1.0)) == {0, 3}


def test_repetition_penalty_by_hand() -> None:
    """Dividing a negative logit would make a seen token likelier; a token seen thrice is penalised once."""
    logits = torch.tensor([-1.0, -1.2, 2.0, 0.0, 3.0])
    actual = sampling.penalise_repetition(logits, [0, 2, 2, 3, 2, 0], 1.5)
    assert torch.allclose(actual, torch.tensor([-1.5, -1.2, 2 / 1.5, 0.0, 3.0]), rtol=1e-6, atol=0)
    assert torch.equal(sampling.penalise_repetition(logits, [0, 2], 1.0), logits)


@pytest.mark.parametrize(
    "ids, n, banned",
    [
        ([1, 2, 3, 1, 2], 3, {3}),
        ([1, 2, 3, 1, 2, 4, 1, 2], 3, {3, 4}),
        ([1, 2, 3], 1, {1, 2, 3}),
        ([1, 1, 1], 2, {1}),
        ([1, 2], 3, set()),
        ([1, 2, 3], 3, set()),
        ([2, 3, 4, 1], 2, set()),
        ([], 1, set()),
    ],
)
def test_repeated_ngrams_by_hand(ids: list[int], n: int, banned: set[int]) -> None:
    for history in (ids, array("q", ids)):
        assert kept(sampling.ban_repeated_ngrams(torch.zeros(5), history, n)) == set(range(5)) - banned


def test_min_new_tokens_bars_end_ids_only_and_only_until_reached() -> None:
    params = SamplingParams(min_new_tokens=2)
    for n_new, expected in ((0, {0, 3}), (1, {0, 3}), (2, {0, 1, 2, 3}), (3, {0, 1, 2, 3})):
        scores = sampling.process(torch.zeros(4), [0], n_new, params, end_ids=(1, 2, 99, -1))
        assert kept(scores) == expected


def test_missing_ids_are_never_drawn() -> None:
    """Rows that pad a vocabulary to a round size have logits too, and no token."""
    params = SamplingParams(temperature=1.0)
    scores = sampling.process(torch.tensor([0.0, 1.0, 90.0, 90.0]), [0], 0, params, missing_ids=range(2, 4))
    assert kept(scores) == {0, 1}


# Extremes.


@pytest.mark.parametrize("t", [1e-8, 1e-40, 5e-324])
@pytest.mark.parametrize("kind", ["smooth", "peaked", "huge", "tiny"])
def test_tiny_temperatures_are_greedy(t: float, kind: str) -> None:
    logits = make_logits(300, 4, kind) if kind != "tiny" else make_logits(300, 4, "smooth") - 1e30
    logits[17] = float(logits.max()) + max(1.0, abs(float(logits.max())) / 10)
    for shifted in (logits, logits - 2 * logits.max(), sampling.keep_top_k(logits, 3)):
        scores = sampling.scale_temperature(shifted, t)
        assert not scores.isnan().any() and scores[17].isfinite()
        assert float(scores.softmax(-1)[17]) == 1.0


def test_tiny_temperatures_keep_ties() -> None:
    scores = sampling.scale_temperature(torch.tensor([5.0, 5.0, 4.0]), 1e-40)
    assert scores.softmax(-1).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("t", [1e30, 1e39, 1e308])
def test_huge_temperatures_are_uniform_over_what_is_left(t: float) -> None:
    """A barred token's -inf divided by a temperature that is infinite in float32 is NaN."""
    probabilities = sampling.scale_temperature(torch.tensor([5.0, -INF, 4.0]), t).softmax(-1)
    assert probabilities.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_an_error(bad: float, temperature: float) -> None:
    logits = make_logits(VOCAB, 6, "smooth")
    logits[123] = bad
    with pytest.raises(CheckpointError, match=r"NaN or infinity.*float32"):
        sampling.process(logits, [0], 0, SamplingParams(temperature=temperature))


def test_large_finite_logits_are_not_an_error() -> None:
    """Their sum overflows; they do not."""
    logits = torch.tensor([3e38, 3e38, 1.0])
    assert torch.equal(sampling.process(logits, [0], 0, SamplingParams()), logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_barring_every_token_is_an_error_not_token_0(temperature: float) -> None:
    """transformers takes token 0 when greedy, and fails inside multinomial when sampling."""
    for params, end_ids, missing_ids in (
        (SamplingParams(temperature=temperature, suppress_tokens=(0, 1, 2)), (), ()),
        (SamplingParams(temperature=temperature, no_repeat_ngram_size=1), (), ()),
        (SamplingParams(temperature=temperature, min_new_tokens=9, suppress_tokens=(0,)), (1,), (2,)),
    ):
        with pytest.raises(MiniGPTError, match="no token is left to draw"):
            sampling.process(torch.zeros(3), [0, 1, 2], 0, params, end_ids, missing_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_that_overflow_are_an_error(temperature: float) -> None:
    for override in ({"logit_bias": {1: 1e39}}, {"repetition_penalty": 1e-40}, {"repetition_penalty": 1e-60}):
        params = SamplingParams(temperature=temperature, **override)
        with pytest.raises(MiniGPTError, match="a bias or repetition_penalty"):
            sampling.process(torch.tensor([0.0, 1.0, 2.0]), [0, 1, 2], 0, params)


def test_check_params_names_the_id_and_the_vocabulary() -> None:
    sampling.check_params(SamplingParams(logit_bias={4: 1.0}, suppress_tokens=(4,), stop_ids=(99,)), 5)
    with pytest.raises(ValueError, match=r"logit_bias.*50257.* 50257 ids"):
        sampling.check_params(SamplingParams(logit_bias={50257: 1.0}), 50257)
    with pytest.raises(ValueError, match=r"suppress_tokens.* 7\b.* 5 ids"):
        sampling.check_params(SamplingParams(suppress_tokens=(1, 7)), 5)


# The draw.


@pytest.mark.parametrize("seed", [*range(40), 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_draws_equal_multinomial_after_manual_seed(seed: int) -> None:
    params = SamplingParams(temperature=1.0)
    logits = make_logits(VOCAB, seed % 7, "smooth")
    filtered = sampling.keep_top_k(logits, 50)
    torch.manual_seed(seed)
    expected = [int(torch.multinomial(scores.softmax(-1)[None], 1)) for scores in (logits, filtered, logits)]
    generator = torch.Generator().manual_seed(seed)
    assert [sampling.draw(scores, params, generator) for scores in (logits, filtered, logits)] == expected
    assert torch.equal(generator.get_state(), torch.get_rng_state())  # and the next draws will be equal, too


def test_the_fast_exponentials_are_multinomials() -> None:
    """The probe looks at one seed and 1000 numbers."""
    if not sampling._exponential_is_log1p():
        pytest.skip("this build of torch draws exponentials in another way: the fast path is off")
    for seed in range(20):
        expected = torch.empty(VOCAB).exponential_(generator=torch.Generator().manual_seed(seed))
        actual = sampling._exponential(VOCAB, torch.Generator().manual_seed(seed))
        # Equal as measured. A last-bit difference in log1p may reach float32 once in some 1e8 numbers.
        assert (actual != expected).sum() <= 1
        assert torch.allclose(actual, expected, rtol=2e-7, atol=0)


def test_without_the_fast_exponentials_the_draw_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0)
    logits = make_logits(VOCAB, 1, "smooth")
    fast = [sampling.draw(logits, params, torch.Generator().manual_seed(seed)) for seed in range(20)]
    monkeypatch.setattr(sampling, "_exponential_is_log1p", lambda: False)
    assert [sampling.draw(logits, params, torch.Generator().manual_seed(seed)) for seed in range(20)] == fast


def test_the_draw_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=1.0)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sampling.draw(probabilities.log(), params, generator)] += 1
    # 4000 draws: the standard deviation is at most 0.008, so 0.04 is five of them.
    assert counts[1] == 0 and (counts / 4000 - probabilities).abs().max() < 0.04


def test_a_flat_distribution_is_not_cut_to_50_tokens() -> None:
    """The default top_k of 50 in transformers is not ours."""
    params = SamplingParams(temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    scores = sampling.process(torch.zeros(1000), [0], 0, params)
    # 300 of 1000 give 259 distinct ids on average
    assert len({sampling.draw(scores, params, generator) for _ in range(300)}) > 200


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    for size in (5, VOCAB):
        logits = torch.zeros(size)
        logits[[2, 3, size - 1]] = 1.0
        assert sampling.draw(logits, SamplingParams()) == 2
        assert sampling.draw(torch.zeros(size), SamplingParams()) == 0


def test_the_global_random_state_is_neither_used_nor_moved() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    sampling._exponential_is_log1p.cache_clear()
    scores = sampling.process(make_logits(VOCAB, 1, "smooth"), [0], 0, params)
    sampling.draw(scores, params, torch.Generator().manual_seed(5))
    sampling.draw(scores, SamplingParams())
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="needs a generator"):
        sampling.draw(scores, params)


# Log-probabilities.


@pytest.mark.parametrize("k", [0, 1, 5, 100_000])
def test_log_probabilities(k: int) -> None:
    logits = make_logits(VOCAB, 8, "smooth")
    expected = logits.log_softmax(-1)
    own, top = sampling.best_log_probabilities(logits, 42, k)
    assert own == float(expected[42])
    assert [value for _, value in top] == expected.sort(descending=True).values[:k].tolist()
    assert all(value == float(expected[id]) for id, value in top[:100])
    assert len({id for id, _ in top}) == len(top) == min(k, VOCAB)


def test_log_probabilities_put_the_lower_id_first_on_a_tie() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 3.0])
    assert [id for id, _ in sampling.best_log_probabilities(logits, 0, 4)[1]] == [2, 5, 1, 3]
    assert [id for id, _ in sampling.best_log_probabilities(torch.zeros(VOCAB), 0, 3)[1]] == [0, 1, 2]
    own, _ = sampling.best_log_probabilities(torch.zeros(4).half(), 3, 0)
    assert abs(own - math.log(0.25)) < 1e-7
