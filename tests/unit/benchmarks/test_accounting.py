"""The figures of the bench: work counted against loops, parts and statistics against hand-made cases.

Nothing here measures a time.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks import parts, rows, stats, summary
from benchmarks.work import ModelShape, Work, padded_work, real_tokens, shared_work

SHAPE = ModelShape(layers=2, hidden=8, intermediate=12, heads=4, key_value_heads=2, head_dim=3, vocabulary=50)


def test_body_parameters_are_those_of_the_seven_matrices():
    """A layer: q 8x12, k and v 8x6, o 12x8, gate and up 8x12, down 12x8: 96 + 96 + 96 + 288 = 576; two layers."""
    assert SHAPE.body_parameters == 1152


def test_shared_work_counts_each_visible_couple_once():
    lengths = [(3, 2, 4), (1, 1, 1)]
    couples = 0
    for prompt, *branches in lengths:
        couples += sum(1 for q in range(prompt) for k in range(prompt) if k <= q)
        for branch in branches:
            couples += sum(1 for q in range(branch) for k in range(prompt + branch) if k <= prompt + q)
    work = shared_work(lengths)
    assert (work.tokens, work.attended, work.scored) == (12, couples, 8)


def test_padded_work_is_a_rectangle():
    """Two pairs, longest row 3 + 4 = 7: four rows of 7 positions, 28 couples each."""
    lengths = [(3, 2, 4), (1, 1, 1)]
    assert padded_work(lengths, head_everywhere=True) == Work(28, 4 * 28, 28)
    assert padded_work(lengths, head_everywhere=False) == Work(28, 4 * 28, 8)
    assert real_tokens(lengths) == (3 + 2) + (3 + 4) + 2 + 2


def test_flops_of_one_token_by_hand():
    """Forward: 2 x 1152 (body), 4 x layers x heads x head_dim (one couple), 2 x 8 x 50 (head); in all times 3 or 4."""
    forward = 2 * 1152 + 4 * 2 * 4 * 3 + 2 * 8 * 50
    assert Work(1, 1, 1).flops(SHAPE, reference_forward=False) == 3 * forward
    assert Work(1, 1, 1).flops(SHAPE, reference_forward=True) == 4 * forward


def test_a_step_with_an_unexplained_number_of_positions_is_refused():
    step = {"lengths": [[3, 2, 4]], "forwarded": 9}
    assert summary.work_done(step, "cpu") == shared_work([(3, 2, 4)])
    assert summary.work_done({**step, "forwarded": 14}, "cpu") == padded_work([(3, 2, 4)], head_everywhere=True)
    with pytest.raises(ValueError, match="10 positions"):
        summary.work_done({**step, "forwarded": 10}, "cpu")


def test_ratio_of_a_constant_factor_has_no_width():
    measured = stats.ratio([4.0, 8.0, 6.0], [2.0, 4.0, 3.0])
    assert set(measured.values()) == {2.0}


def test_ratio_interval_holds_the_ratio_and_pairs_stay_pairs():
    """Step times vary 10-fold, their ratio by 1 %: an interval over couples stays as narrow as the ratios are."""
    slow = [10.0 * (1 + i) * (1 + 0.001 * i) for i in range(10)]
    fast = [5.0 * (1 + i) for i in range(10)]
    measured = stats.ratio(slow, fast)
    assert measured["per_step_low"] <= measured["per_step"] <= measured["per_step_high"]
    assert measured["per_step_low"] >= 2.0
    assert measured["per_step_high"] <= 2.02


@pytest.mark.parametrize(
    ("name", "shapes", "part"),
    [
        ("aten::mm", [[100, 8], [8, 12]], "matrix products"),
        ("aten::mm", [[100, 8], [8, 49152]], "head"),
        ("aten::addmm", [[8], [49152 - 32768, 100], [100, 8]], "head"),
        ("aten::_log_softmax", [[64, 49152], []], "head"),
        ("aten::mul", [[49152, 8], [49152, 8]], "elementwise"),
        ("aten::copy_", [[49152, 8], [49152, 8]], "copies and gathers"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[1, 2, 3, 4]], "attention forward"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [[1, 2, 3, 4]], "attention backward"),
        ("aten::_foreach_norm", [], "optimizer and clipping"),
        ("aten::transpose", [[2, 3]], "other"),
    ],
)
def test_parts(name, shapes, part):
    assert parts.part_of(name, shapes, False, parts.head_widths(49152)) == part


def test_what_the_optimizer_does_is_the_optimizers():
    assert parts.part_of("aten::mm", [[8, 49152]], True, parts.head_widths(49152)) == "optimizer and clipping"


@pytest.mark.parametrize("name", sorted(rows.GENERATED))
def test_generated_lengths_fit_and_repeat(name):
    profile = rows.GENERATED[name]
    lengths = rows.draw_lengths(profile, 400, seed=0)
    assert lengths == rows.draw_lengths(profile, 400, seed=0) != rows.draw_lengths(profile, 400, seed=1)
    assert all(p + max(c, r) <= profile.max_length and min(p, c, r) >= 16 for p, c, r in lengths)


def padding_of_batches(lengths: list[tuple[int, int, int]], size: int) -> float:
    batches = [lengths[a:b] for a, b in pairwise(range(0, len(lengths) + 1, size))]
    return sum(padded_work(b, head_everywhere=True).tokens for b in batches) / sum(map(real_tokens, batches))


@pytest.mark.parametrize(("name", "padding", "sharing"), [("short", 1.69, 1.40), ("long", 2.04, 1.67)])
def test_generated_profiles_pad_and_share_like_the_data_they_stand_for(name, padding, sharing):
    """Batches of 8 of such data pad and share this much (measured on rows of these lengths), here within a tenth."""
    lengths = rows.draw_lengths(rows.GENERATED[name], 4000, seed=0)
    assert padding_of_batches(lengths, 8) == pytest.approx(padding, rel=0.1)
    assert real_tokens(lengths) / shared_work(lengths).tokens == pytest.approx(sharing, rel=0.03)
