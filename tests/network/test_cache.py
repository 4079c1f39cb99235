"""KVCache: rows join, shrink and leave, and a failed row leaves nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import from_hf, hf_model

from minigpt import GPT2, KVCache


def model_and_ids() -> tuple[GPT2, torch.Tensor]:
    return from_hf(hf_model()).requires_grad_(False), torch.randint(0, 64, (4, 32))


@torch.no_grad()
def test_rows_join_shrink_and_leave_and_each_gives_what_it_gives_alone() -> None:
    model, ids = model_and_ids()
    cache, held = KVCache(model.config, 3, 8, rows=0), []
    assert cache.lengths == []
    for which, length in ((0, 5), (1, 8), (2, 2)):
        row = cache.add_row()
        model(ids[which : which + 1, :length], cache.row(row))
        held.append(which)
        assert cache.lengths[row] == length
    with pytest.raises(ValueError, match="all 3 rows of the cache are in use"):
        cache.add_row()
    cache.drop_row(0)  # the last row moves into the gap
    held[0] = held.pop()
    cache.reserve(20)
    cache.cut(1, 6)
    assert cache.lengths == [2, 6] and cache.max_len == 20
    cache.copy_row(1, cache.add_row(), 4)
    held.append(held[1])
    assert cache.lengths == [2, 6, 4]
    lengths = list(cache.lengths)
    new = torch.stack([ids[which, length : length + 3] for which, length in zip(held, lengths, strict=True)])
    logits = model(new, cache)
    for row, (which, length) in enumerate(zip(held, lengths, strict=True)):
        alone = model(ids[which : which + 1, : length + 3])[0, length:]
        assert (logits[row] - alone).abs().max() < 5e-5  # measured: 4e-6
    assert cache.lengths == [5, 9, 7]


def test_a_row_is_not_cut_to_what_it_has_not() -> None:
    cache = KVCache(model_and_ids()[0].config, 2)
    for length in (1, -1):
        with pytest.raises(ValueError, match=f"row 1 has 0 tokens and cannot be cut to {length}"):
            cache.cut(1, length)


@pytest.mark.parametrize("bad", [0, 1, 2])
@torch.no_grad()
def test_a_damaged_row_leaves_no_nan_behind(bad: int) -> None:
    """0 * NaN is NaN: the next prompt in the slot, shorter than the batch's longest, failed as well."""
    model, ids = model_and_ids()
    cache = KVCache(model.config, 3)
    for row, length in enumerate((20, 20, 20)):
        model(ids[row : row + 1, :length], cache.row(row))
    cache.keys[:, bad, :, :20], cache.values[:, bad, :, :20] = float("nan"), float("nan")
    cache.drop_row(bad, damaged=True)
    assert cache.keys.isfinite().all() and cache.values.isfinite().all()
    row = cache.add_row()
    model(ids[3:, :2], cache.row(row))
    new = torch.stack([ids[0, 20:21], ids[1, 20:21], ids[3, 2:3]])
    logits = model(new, cache)
    assert logits.isfinite().all() and (logits[row] - model(ids[3:, :3])[0, 2:]).abs().max() < 5e-5


@torch.no_grad()
def test_what_a_step_needs_follows_the_lengths() -> None:
    """Positions and masks are kept for a step: another one, or another mask, makes new ones."""
    model, ids = model_and_ids()
    mask, cache = model.h[0].attn.mask, KVCache(model.config, 2)
    model(ids[:1, :3], cache.row(0))
    for n_new in (1, 2, 1):
        rows, positions = cache.indices(n_new)
        assert rows.tolist() == [[0], [1]]
        assert positions.tolist() == [list(range(3, 3 + n_new)), list(range(n_new))]
        assert cache.indices(n_new)[1] is positions
        assert torch.equal(cache.visible(mask, n_new), mask[positions, : 3 + n_new].unsqueeze(1))
    assert not cache.visible(torch.zeros_like(mask), 1).any()
    model(ids[:2, :1], cache)
    assert cache.indices(1)[1].tolist() == [[4], [1]]
    cache.cut(0, 2)
    assert cache.indices(1)[1].tolist() == [[2], [1]] and cache.visible(mask, 1).shape == (2, 1, 1, 3)
    assert copy.deepcopy(cache).lengths == [2, 1]
