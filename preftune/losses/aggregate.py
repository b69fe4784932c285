"""From losses of tokens to the loss of an optimizer step: reductions by name, each with its paper.

A reduction gives a micro-batch's share: its denominators are totals of the whole step over all micro-batches and ranks,
so that shares add up to the step's loss however the rows are split.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from preftune.losses.importance import masked_mean

# (loss_BT, mask_BT, *, rows, tokens, max_completion_length) -> scalar share
Reduction = Callable[..., Tensor]


def sequence_mean(
    loss_BT: Float[Tensor, "B T"], mask_BT: Float[Tensor, "B T"], *, rows: Tensor | float, **_: object
) -> Float[Tensor, ""]:
    """Mean over completions of each one's mean over tokens (GRPO, arXiv:2402.03300; SAPO, arXiv:2511.20347).

    A token of a long completion weighs less. Completions without scored tokens count as 0 among `rows`.

    One fact to check: two completions of 2 and 6 tokens with losses -1 and 1 give 0.
    """
    return masked_mean(loss_BT, mask_BT).sum() / _at_least_one(rows)


def token_mean(
    loss_BT: Float[Tensor, "B T"], mask_BT: Float[Tensor, "B T"], *, tokens: Tensor | float, **_: object
) -> Float[Tensor, ""]:
    """Mean over all scored tokens (DAPO, arXiv:2503.14476, eq. 8; also BNPO, CISPO and VESPO here).

    TRL's bnpo divides by the tokens of each micro-batch, its dapo by a share of the round's;
    with the true total of the step the two are one.

    One fact to check: completions of 2 and 6 tokens with losses -1 and 1 give (-2 + 6) / 8.
    """
    return _total(loss_BT, mask_BT) / _at_least_one(tokens)


def fixed_length(
    loss_BT: Float[Tensor, "B T"],
    mask_BT: Float[Tensor, "B T"],
    *,
    rows: Tensor | float,
    max_completion_length: int,
    **_: object,
) -> Float[Tensor, ""]:
    """Sum over tokens over a constant: completions times `max_completion_length` (Dr. GRPO, arXiv:2503.20783).

    One fact to check: completions of 2 and 6 tokens with losses -1 and 1 give (-2 + 6) / (2 max_completion_length).
    """
    return _total(loss_BT, mask_BT) / (_at_least_one(rows) * max_completion_length)


def sequence_sum(
    loss_BT: Float[Tensor, "B T"], mask_BT: Float[Tensor, "B T"], *, rows: Tensor | float, **_: object
) -> Float[Tensor, ""]:
    """Mean over completions of each one's sum over tokens (LUSPO, arXiv:2602.05261).

    With GSPO's ratio, which has 1/n in its gradient, no completion's weight depends on its length n.

    One fact to check: completions of 2 and 6 tokens with losses -1 and 1 give (-2 + 6) / 2.
    """
    return _total(loss_BT, mask_BT) / _at_least_one(rows)


def _total(loss_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return loss_BT.where(mask_BT > 0, 0.0).sum()


def _at_least_one(total: Tensor | float) -> Tensor | float:
    """A step in which every token is masked has the loss 0, not NaN."""
    return total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)


REDUCTION_OF: dict[str, Reduction] = {
    "grpo": sequence_mean,
    "bnpo": token_mean,
    "dr_grpo": fixed_length,
    "dapo": token_mean,
    "cispo": token_mean,
    "sapo": sequence_mean,
    "luspo": sequence_sum,
    "vespo": token_mean,
}
