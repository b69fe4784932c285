"""The loss of reward models: Bradley-Terry on the scores of a pair, with a margin and a pull towards zero.

One value a pair, not reduced: the trainer divides the sum by the pairs of the whole optimizer step.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_B: Float[Tensor, " B"],
    rejected_B: Float[Tensor, " B"],
    margin_B: Float[Tensor, " B"] | None = None,
    *,
    center_rewards_coefficient: float | None = None,
) -> Float[Tensor, " B"]:
    """-log s(r_c - r_rj - m) + c (r_c + r_rj)^2, s the logistic function; above 0.

    P(chosen beats rejected) = s(r_c - r_rj) is the model of Bradley and Terry (1952) as used for reward models
    (arXiv:2203.02155); the margin m is Llama 2's (arXiv:2307.09288), the second term that of arXiv:2312.09244: the
    first leaves the level of the scores free, this one holds their mean at 0.

    Args:
        chosen_B: Scores of the chosen answers.
        rejected_B: Scores of the rejected answers.
        margin_B: By how much the chosen score is to be above the other; None is 0.
        center_rewards_coefficient: c, at least 0; None is 0.

    One fact to check: log 2 where both scores are 0, whatever c is; adding a constant to both scores changes nothing
    without c.
    """
    gap_B = chosen_B - rejected_B
    if margin_B is not None:
        gap_B = gap_B - margin_B
    loss_B = -logsigmoid(gap_B)
    if center_rewards_coefficient:
        loss_B = loss_B + center_rewards_coefficient * (chosen_B + rejected_B) ** 2
    return loss_B
