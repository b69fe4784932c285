"""The losses of online training once more, as loops over tokens in float64 with the math module alone.

Written from the formulas of the papers; shares no code with the package.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

Rows = list[list[float]]


@dataclass(frozen=True)
class Case:
    """Completions as lists of token log-probabilities; `scored` marks the tokens that count."""

    logps: Rows
    old: Rows
    ref: Rows
    advantages: list[float]
    scored: Rows

    def tensors(self, width: int | None = None, fill: float = 0.0) -> tuple[torch.Tensor, ...]:
        """logps (a leaf with gradient), old, ref, advantages, mask, padded to `width` with `fill`."""
        width = width or max(map(len, self.logps))
        rows = [padded(values, width, fill) for values in (self.logps, self.old, self.ref)]
        rows[0].requires_grad_(True)
        return (*rows, torch.tensor(self.advantages, dtype=torch.float64), padded(self.scored, width, 0.0))


def padded(rows: Rows, width: int, fill: float) -> torch.Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


def random_case(seed: int, lengths: tuple[int, ...] = (3, 1, 6, 4), spread: float = 0.5) -> Case:
    """Advantages of both signs, ratios on both sides of every bound, a row without scored tokens at times."""
    draw = random.Random(seed)
    logps = [[draw.uniform(-3, -0.05) for _ in range(n)] for n in lengths]
    near = [[[logp + draw.uniform(-spread, spread) for logp in row] for row in logps] for _ in range(2)]
    scored = [[float(draw.random() < 0.8) for _ in range(n)] for n in lengths]
    return Case(logps, near[0], near[1], [draw.uniform(-2, 2) for _ in lengths], scored)


def token_ratios(case: Case, level: str) -> Rows:
    ratios = []
    for row, old, scored in zip(case.logps, case.old, case.scored, strict=True):
        logs = [(a - b) if m else 0.0 for a, b, m in zip(row, old, scored, strict=True)]
        if level == "sequence":
            logs = [sum(logs) / max(sum(scored), 1)] * len(logs)
        ratios.append([math.exp(x) for x in logs])
    return ratios


def phi(case: Case, b: int, hyper: dict) -> float:
    logs = sum(
        max(-20, min(20, new - old)) * m for new, old, m in zip(case.logps[b], case.old[b], case.scored[b], strict=True)
    )
    if hyper.get("sampler") is not None:
        rhos = hyper["sampler"][b][: len(case.scored[b])]  # padding stands at the end
        logs += sum(math.log(max(rho, 1e-8)) * m for rho, m in zip(rhos, case.scored[b], strict=True))
    logs = max(math.log(1e-8), min(20, logs))
    k, lam = (hyper.get("k_pos", 2.0), hyper.get("lambda_pos", 3.0))
    if case.advantages[b] < 0:
        k, lam = (hyper.get("k_neg", 3.0), hyper.get("lambda_neg", 2.0))
    return math.exp(lam + k * logs - lam * math.exp(logs))


def surrogate(name: str, w: float, logp: float, advantage: float, case: Case, b: int, hyper: dict) -> float:
    eps = hyper.get("epsilon", 0.2)
    high = hyper["epsilon_high"] if hyper.get("epsilon_high") is not None else eps
    if name == "cispo":
        cap = hyper["epsilon_high"] if hyper.get("epsilon_high") is not None else 5.0
        return -min(w, cap) * advantage * logp
    if name == "sapo":
        tau = hyper.get("tau_pos", 1.0) if advantage > 0 else hyper.get("tau_neg", 1.05)
        return -(4 / tau) / (1 + math.exp(-tau * (w - 1))) * advantage
    if name == "vespo":
        return -phi(case, b, hyper) * advantage * logp
    clipped = max(1 - eps, min(1 + high, w))
    unclipped = w if hyper.get("delta") is None else min(w, hyper["delta"])
    return -min(unclipped * advantage, clipped * advantage)


def loop_losses(name: str, case: Case, *, level: str = "token", beta: float = 0.0, **hyper) -> Rows:
    """Loss of every token; hyper: epsilon, epsilon_high, delta, keep, sampler (lists of rows), correct_kl."""
    ratios, result = token_ratios(case, level), []
    for b, logps in enumerate(case.logps):
        row = []
        for t, logp in enumerate(logps):
            if not case.scored[b][t]:
                row.append(0.0)
                continue
            loss = surrogate(name, ratios[b][t], logp, case.advantages[b], case, b, hyper)
            if hyper.get("keep") is not None:
                loss *= hyper["keep"][b][t]
            if hyper.get("sampler") is not None and name != "vespo":
                loss *= hyper["sampler"][b][t]
            gap = case.ref[b][t] - logp
            kl = math.exp(gap) - gap - 1
            row.append(loss + beta * kl * (ratios[b][t] if hyper.get("correct_kl", True) else 1.0))
        result.append(row)
    return result


def finite_differences(case: Case, total) -> Rows:
    """The gradient of `total(case)` with respect to every policy log-probability, by central differences."""
    step, result = 1e-6, []
    for b, row in enumerate(case.logps):
        gradient = []
        for t, _ in enumerate(row):
            values = []
            for sign in (1, -1):
                moved = [list(r) for r in case.logps]
                moved[b][t] += sign * step
                values.append(total(replace(case, logps=moved)))
            gradient.append((values[0] - values[1]) / (2 * step))
        result.append(gradient)
    return result
