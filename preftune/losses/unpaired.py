"""Losses of labelled single completions, a plain function each, and `UNPAIRED_LOSSES` that names them: one value a row.

In the equations l is a summed log-probability under the policy, r = l - l_ref, s the logistic function, z the baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from preftune.types import LossOutput

# (logps_B, ref_logps_B, is_desirable_B, kl, *, beta) -> LossOutput, without class weights
UnpairedLoss = Callable[..., LossOutput]

# Weighted desirable rows for each weighted undesirable one (arXiv:2402.01306).
BALANCE = (1.0, 4 / 3)


def kto(
    logps_B: Float[Tensor, " B"],
    ref_logps_B: Float[Tensor, " B"],
    is_desirable_B: Bool[Tensor, " B"],
    kl: Float[Tensor, ""],
    *,
    beta: float,
) -> LossOutput:
    """KTO, 1 - s(beta (r - z)) for desirable rows and 1 - s(beta (z - r)) for others (arXiv:2402.01306). In (0, 1).

    Args:
        kl: The baseline z, at least 0 and without gradient; see `kl_baseline`.

    One fact to check: 1/2 where r = z, for every beta and label.
    """
    ahead_B = logps_B - ref_logps_B - kl
    return LossOutput(torch.sigmoid(-beta * _signed(ahead_B, is_desirable_B)))


def apo_zero_unpaired(
    logps_B: Float[Tensor, " B"],
    ref_logps_B: Float[Tensor, " B"],
    is_desirable_B: Bool[Tensor, " B"],
    kl: Any = None,
    *,
    beta: float,
) -> LossOutput:
    """APO-zero for single rows, 1 - s(beta r) desirable, s(beta r) undesirable (arXiv:2408.06266). In (0, 1).

    One fact to check: `kto` with a baseline of 0; `kl` is not read.
    """
    return LossOutput(torch.sigmoid(-beta * _signed(logps_B - ref_logps_B, is_desirable_B)))


UNPAIRED_LOSSES: dict[str, UnpairedLoss] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


def kl_baseline(total: Tensor, rows: Tensor | float) -> Float[Tensor, ""]:
    """KTO's baseline z = max(0, mean of l(y'|x) - l_ref(y'|x)) over prompts with the completion of another prompt.

    Args:
        total: Sum of the log-ratios over all rows of the optimizer step.
        rows: How many there are.

    The result has no gradient; NaN stays NaN.
    """
    return (total.detach() / rows).clamp(min=0).float()


def class_weights(
    is_desirable_B: Bool[Tensor, " B"], *, desirable_weight: float, undesirable_weight: float
) -> Float[Tensor, " B"]:
    """The weight of each row: the paper's lambda_D or lambda_U."""
    weights = torch.tensor([undesirable_weight, desirable_weight], device=is_desirable_B.device)
    return weights[is_desirable_B.long()]


def imbalance(
    desirable: int, undesirable: int, *, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> str | None:
    """What is wrong with the class weights for so many rows of each label, or None.

    The paper wants desirable_weight * desirable over undesirable_weight * undesirable in [1, 4/3].

    One fact to check: 8 desirable and 2 undesirable rows want an undesirable_weight in [3, 4].
    """
    counts = f"{desirable:,} desirable and {undesirable:,} undesirable rows"
    if not desirable or not undesirable:
        missing = "undesirable (label false)" if desirable else "desirable (label true)"
        return f"{counts}: without {missing} rows the policy is only pushed one way. Add some if you can."
    low, high = BALANCE
    good, bad = desirable * desirable_weight, undesirable * undesirable_weight
    if good and bad and low <= round(good / bad, 2) <= round(high, 2):
        return None
    wanted = []
    if bad:
        wanted.append(f"desirable_weight in [{low * bad / desirable:.2f}, {high * bad / desirable:.2f}]")
    if good:
        wanted.append(f"undesirable_weight in [{good / undesirable / high:.2f}, {good / undesirable / low:.2f}]")
    return (
        f"{counts} with desirable_weight={desirable_weight:g} and undesirable_weight={undesirable_weight:g} weigh "
        f"{good:,.0f} to {bad:,.0f}; the recommended ratio is 1 to 4/3. Set {' or '.join(wanted)}."
    )


def _signed(values_B: Tensor, is_desirable_B: Tensor) -> Tensor:
    return torch.where(is_desirable_B, values_B, -values_B)
