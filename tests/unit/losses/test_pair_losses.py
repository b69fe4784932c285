"""Every pair loss against a loop in float64 with the math module alone, hand values, symmetries and gradients.

The loop (`loop_losses`) is written from the formulas of the papers; it shares no code with the package.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.errors import ConfigError
from preftune.losses.names import (
    BATCH_COUPLED,
    DIVERGENCES,
    IGNORES_F_DIVERGENCE,
    PAIR_LOSS_NAMES,
    REFERENCE_FREE,
    validate_pair_losses,
)
from preftune.losses.preference import PAIR_LOSSES, implicit_rewards, weighted_pair_loss
from preftune.types import LossOutput, PairScores

TAKES_DIVERGENCE = [n for n in PAIR_LOSS_NAMES if n not in IGNORES_F_DIVERGENCE and n not in REFERENCE_FREE]
CASES = [(n, d) for n in TAKES_DIVERGENCE for d in DIVERGENCES] + [
    (n, "reverse_kl") for n in PAIR_LOSS_NAMES if n not in TAKES_DIVERGENCE
]


def pairs(chosen, rejected, *, lengths=None, dtype=torch.float64, requires_grad=False) -> PairScores:
    """PairScores of lists; `lengths` is (chosen, rejected), 1 where not given."""
    n_c, n_r = lengths or ([1] * len(chosen), [1] * len(chosen))
    chosen_logps = torch.tensor(chosen, dtype=dtype, requires_grad=requires_grad)
    return PairScores(
        chosen_logps=chosen_logps,
        rejected_logps=torch.tensor(rejected, dtype=dtype, requires_grad=requires_grad),
        chosen_lengths=torch.tensor(n_c, dtype=dtype),
        rejected_lengths=torch.tensor(n_r, dtype=dtype),
        chosen_nll=-chosen_logps,
        mean_chosen_length=torch.tensor(sum(n_c) / len(n_c), dtype=dtype),
    )


def random_pairs(seed: int, size: int = 7, dtype=torch.float64) -> tuple[PairScores, PairScores, dict]:
    """A policy and a reference, and the same numbers as lists."""
    draw = random.Random(seed)
    n_c = [draw.randint(1, 9) for _ in range(size)]
    n_r = [draw.randint(1, 9) for _ in range(size)]
    numbers = {key: [draw.uniform(-9, -3) for _ in range(size)] for key in ("pc", "pr")}
    for key, of in (("rc", "pc"), ("rr", "pr")):
        numbers[key] = [logp + draw.uniform(-2.5, 2.5) for logp in numbers[of]]
    policy = pairs(numbers["pc"], numbers["pr"], lengths=(n_c, n_r), dtype=dtype)
    ref = pairs(numbers["rc"], numbers["rr"], lengths=(n_c, n_r), dtype=dtype)
    return policy, ref, {**numbers, "nc": n_c, "nr": n_r}


# ---- the independent loop -------------------------------------------------------------------------------------------


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_s(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def g_loop(r: float, divergence: str, alpha: float) -> float:
    if divergence == "forward_kl":
        return 1 - 1 / math.exp(r)
    if divergence == "js_divergence":
        return math.log(2 * math.exp(r) / (1 + math.exp(r)))
    if divergence == "alpha_divergence":
        return (math.exp(r) ** (alpha - 1) - 1) / (alpha - 1)
    return r


def one_pair(name: str, rc: float, rr: float, nc: int, nr: int, *, beta, eps, tau, divergence, alpha) -> float:
    """The loss of one pair, all but the ones that look at other pairs and sft."""
    gc, gr = g_loop(rc, divergence, alpha), g_loop(rr, divergence, alpha)
    z = beta * (gc - gr)
    k = s(z / tau)
    formulas = {
        "sigmoid": lambda: (1 - eps) * -log_s(z) + eps * -log_s(-z),
        "hinge": lambda: max(0.0, 1 - z),
        "ipo": lambda: (gc / nc - gr / nr - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: -log_s(beta * (gc / nc - gr / nr)),
        "exo_pair": lambda: s(z) * (log_s(z) - math.log(1 - eps)) + s(-z) * (log_s(-z) - math.log(eps)),
        "robust": lambda: ((1 - eps) * -log_s(z) - eps * -log_s(-z)) / (1 - 2 * eps),
        "nca_pair": lambda: -log_s(beta * rc) - 0.5 * log_s(-beta * rc) - 0.5 * log_s(-beta * rr),
        "bco_pair": lambda: -log_s(beta * rc) - log_s(-beta * rr),
        "sppo_hard": lambda: (rc - 0.5 / beta) ** 2 + (rr + 0.5 / beta) ** 2,
        "apo_zero": lambda: (1 - s(beta * rc)) + s(beta * rr),
        "apo_down": lambda: s(beta * rc) + 1 - s(beta * (rc - rr)),
        "discopop": lambda: (1 - k) * -log_s(z) + k * math.exp(-z),
    }
    return formulas[name]()


def loop_losses(name: str, x: dict, **hyper) -> list[float]:
    if name == "sft":
        mean_length = sum(x["nc"]) / len(x["nc"])
        return [-logp / mean_length for logp in x["pc"]]
    return [
        one_pair(name, pc - rc, pr - rr, nc, nr, **hyper)
        for pc, pr, rc, rr, nc, nr in zip(x["pc"], x["pr"], x["rc"], x["rr"], x["nc"], x["nr"])
    ]


def offered(beta=0.1, eps=0.0, divergence="reverse_kl", alpha=0.5, tau=0.05) -> dict:
    """What the trainer offers to every loss."""
    return {
        "beta": beta,
        "label_smoothing": eps,
        "f_divergence_type": divergence,
        "f_alpha_divergence_coef": alpha,
        "discopop_tau": tau,
    }


@pytest.mark.parametrize(("name", "divergence"), [c for c in CASES if c[0] not in BATCH_COUPLED])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_equals_the_loop(name, divergence, dtype, rel):
    for seed, (beta, eps, alpha, tau) in enumerate(
        [(0.1, 0.1, 0.5, 0.05), (0.7, 0.3, -0.4, 0.6), (0.02, 0.01, 1.6, 2.0)]
    ):
        policy, ref, x = random_pairs(seed, dtype=dtype)
        got = PAIR_LOSSES[name](policy, ref, **offered(beta, eps, divergence, alpha, tau)).loss
        want = loop_losses(name, x, beta=beta, eps=eps, tau=tau, divergence=divergence, alpha=alpha)
        assert got.dtype == dtype
        assert got.tolist() == pytest.approx(want, rel=rel, abs=rel)


def test_the_names_are_the_functions():
    assert tuple(PAIR_LOSSES) == PAIR_LOSS_NAMES
    assert len(PAIR_LOSS_NAMES) == 15


# ---- values by hand -------------------------------------------------------------------------------------------------


def test_ipo_averages_over_tokens():
    """trl#1677 (report R144): tokens at -1.0 against -1.5, 2 chosen and 8 rejected, beta 0.1.

    Per token both log-ratios are 0.5, the gap 0 and the loss (0 - 5)^2 = 25. Sums would give (1 - 4 - 5)^2 = 64.
    """
    policy = pairs([-2.0], [-8.0], lengths=([2], [8]))
    ref = pairs([-3.0], [-12.0], lengths=([2], [8]))
    assert PAIR_LOSSES["ipo"](policy, ref, beta=0.1).loss.tolist() == pytest.approx([25.0])


# Policy and reference agree: r = 0, so z = 0, s = 1/2 and log s = -log 2, beta = 0.5.
AT_ZERO = {
    "sigmoid": math.log(2),
    "hinge": 1.0,
    "ipo": 1.0,  # (0 - 1 / (2 * 0.5))^2
    "sigmoid_norm": math.log(2),
    "exo_pair": -math.log(2) - 0.5 * math.log(0.9) - 0.5 * math.log(0.1),
    "robust": math.log(2),  # (0.9 - 0.1) log 2 / (1 - 0.2)
    "nca_pair": 2 * math.log(2),
    "bco_pair": 2 * math.log(2),
    "sppo_hard": 2.0,  # 1 / (2 beta^2)
    "aot": math.log(2),
    "aot_unpaired": math.log(2),
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "discopop": (math.log(2) + 1) / 2,
    "sft": 3.0 / 4,  # minus the log-probability over the length
}


@pytest.mark.parametrize("name", PAIR_LOSS_NAMES)
def test_value_where_policy_and_reference_agree(name):
    scores = pairs([-3.0], [-7.0], lengths=([4], [6]))
    assert PAIR_LOSSES[name](scores, scores, **offered(beta=0.5, eps=0.1)).loss.tolist() == pytest.approx(
        [AT_ZERO[name]]
    )


def test_sigmoid_hand_value():
    """r_c = 2, r_rj = -1, beta = log(3) / 3: z = log 3, s(z) = 3/4, loss = log(4/3); eps = 1/4 adds 1/4 z."""
    policy, ref = pairs([-1.0], [-4.0]), pairs([-3.0], [-3.0])
    assert PAIR_LOSSES["sigmoid"](policy, ref, beta=math.log(3) / 3).loss.item() == pytest.approx(math.log(4 / 3))
    smoothed = PAIR_LOSSES["sigmoid"](policy, ref, beta=math.log(3) / 3, label_smoothing=0.25).loss.item()
    assert smoothed == pytest.approx(math.log(4 / 3) + math.log(3) / 4)


def test_hinge_stops_at_its_margin():
    """beta = 0.5: the loss is 0.5 at d = 1, and exactly 0 with no gradient from d = 2 on."""
    ref = pairs([0.0, 0.0], [0.0, 0.0])
    policy = pairs([1.0, 3.0], [0.0, 0.0], requires_grad=True)
    loss = PAIR_LOSSES["hinge"](policy, ref, beta=0.5).loss
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0.0]
    assert policy.chosen_logps.grad is not None
    assert policy.chosen_logps.grad.tolist() == [-0.5, 0.0]


def test_exo_is_zero_at_its_target():
    """eps = 0.2: zero where s(z) = 0.8, that is z = log 4; positive on both sides."""
    ref = pairs([0.0] * 3, [0.0] * 3)
    policy = pairs([math.log(4) - 0.3, math.log(4), math.log(4) + 0.3], [0.0] * 3)
    below, at, above = PAIR_LOSSES["exo_pair"](policy, ref, beta=1.0, label_smoothing=0.2).loss.tolist()
    assert at == pytest.approx(0, abs=1e-12)
    assert below > 1e-3
    assert above > 1e-3


def test_sigmoid_norm_is_sigmoid_with_beta_over_n():
    policy, ref, _ = random_pairs(3)
    five = torch.full_like(policy.chosen_lengths, 5.0)
    policy = dataclasses.replace(policy, chosen_lengths=five, rejected_lengths=five)
    normed = PAIR_LOSSES["sigmoid_norm"](policy, ref, beta=1.0).loss
    assert normed.tolist() == pytest.approx(PAIR_LOSSES["sigmoid"](policy, ref, beta=0.2).loss.tolist())


# ---- invariants -----------------------------------------------------------------------------------------------------

logp = st.floats(-200, 0, allow_nan=False)
epsilon = st.floats(0.0, 1.0)


@given(beta=st.floats(1e-3, 1e3), chosen=logp, rejected=logp, eps=epsilon)
def test_sigmoid_starts_at_log_2(beta, chosen, rejected, eps):
    scores = pairs([chosen], [rejected])
    assert PAIR_LOSSES["sigmoid"](scores, scores, beta=beta, label_smoothing=eps).loss.item() == pytest.approx(
        math.log(2)
    )


def swapped(scores: PairScores) -> PairScores:
    return dataclasses.replace(
        scores,
        chosen_logps=scores.rejected_logps,
        rejected_logps=scores.chosen_logps,
        chosen_lengths=scores.rejected_lengths,
        rejected_lengths=scores.chosen_lengths,
    )


@pytest.mark.parametrize("name", ["sigmoid", "exo_pair", "aot", "aot_unpaired"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(seed=st.integers(0, 10**6), eps=st.floats(0.01, 0.99), beta=st.floats(0.01, 2))
def test_swapping_the_pair_and_the_label_changes_nothing(name, divergence, seed, eps, beta):
    """Chosen and rejected trade places and eps becomes 1 - eps: the same loss (summed over the batch for aot)."""
    if name in IGNORES_F_DIVERGENCE and divergence != "reverse_kl":
        return
    policy, ref, _ = random_pairs(seed, size=5)
    loss = PAIR_LOSSES[name](policy, ref, **offered(beta, eps, divergence)).loss
    mirror = PAIR_LOSSES[name](swapped(policy), swapped(ref), **offered(beta, 1 - eps, divergence)).loss
    if name in BATCH_COUPLED:
        loss, mirror = loss.sum(0, keepdim=True), mirror.sum(0, keepdim=True)
    assert mirror.tolist() == pytest.approx(loss.tolist(), rel=1e-9, abs=1e-9)


@given(seed=st.integers(0, 10**6), eps=st.floats(0.0, 0.49), beta=st.floats(0.01, 2))
def test_robust_is_unbiased_under_label_noise(seed, eps, beta):
    """Labels flipped with probability eps: the expectation over both outcomes is DPO's loss on the true labels."""
    policy, ref, _ = random_pairs(seed, size=4)
    kept = PAIR_LOSSES["robust"](policy, ref, beta=beta, label_smoothing=eps).loss
    flipped = PAIR_LOSSES["robust"](swapped(policy), swapped(ref), beta=beta, label_smoothing=eps).loss
    clean = PAIR_LOSSES["sigmoid"](policy, ref, beta=beta).loss
    assert ((1 - eps) * kept + eps * flipped).tolist() == pytest.approx(clean.tolist(), rel=1e-6)


@pytest.mark.parametrize(("name", "divergence"), CASES)
def test_permuting_the_batch_permutes_the_losses(name, divergence):
    policy, ref, _ = random_pairs(11, size=6)
    order = [3, 0, 5, 1, 4, 2]

    def permute(scores: PairScores) -> PairScores:
        rows = {f.name: getattr(scores, f.name) for f in dataclasses.fields(scores)}
        return PairScores(**{k: v[order] if v.ndim else v for k, v in rows.items()})

    hyper = offered(eps=0.1, divergence=divergence)
    loss = PAIR_LOSSES[name](policy, ref, **hyper).loss
    assert PAIR_LOSSES[name](permute(policy), permute(ref), **hyper).loss.tolist() == pytest.approx(
        loss[order].tolist()
    )


@pytest.mark.parametrize(("name", "divergence"), [c for c in CASES if c[0] not in BATCH_COUPLED])
def test_a_row_does_not_depend_on_the_others(name, divergence):
    policy, ref, _ = random_pairs(12, size=4)
    hyper = offered(eps=0.1, divergence=divergence)

    def row(scores: PairScores, i: int) -> PairScores:
        rows = {f.name: getattr(scores, f.name) for f in dataclasses.fields(scores)}
        return PairScores(**{k: v[i : i + 1] if v.ndim else v for k, v in rows.items()})

    together = PAIR_LOSSES[name](policy, ref, **hyper).loss.tolist()
    alone = [PAIR_LOSSES[name](row(policy, i), row(ref, i), **hyper).loss.item() for i in range(4)]
    assert together == pytest.approx(alone)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "divergence"), CASES)
def test_gradcheck(name, divergence):
    """Against finite differences in float64; the sum over the batch where rows are coupled."""
    policy, ref, _ = random_pairs(5, size=4)

    def loss(chosen, rejected):
        scores = dataclasses.replace(policy, chosen_logps=chosen, rejected_logps=rejected, chosen_nll=-chosen)
        values = PAIR_LOSSES[name](scores, ref, **offered(0.3, 0.2, divergence, 0.4)).loss
        return values.sum() if name in BATCH_COUPLED else values

    inputs = [t.clone().requires_grad_() for t in (policy.chosen_logps, policy.rejected_logps)]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize(("name", "divergence"), CASES)
def test_finite_far_out(name, divergence):
    """Log-ratios up to 1e4 in magnitude, float32: losses and gradients are finite for all signs and alphas."""
    far = [-1e4, -300.0, -1.0, 0.0, 1.0, 300.0, 1e4]
    chosen, rejected = zip(*[(a, b) for a in far for b in far])
    ref = pairs([0.0] * len(chosen), [0.0] * len(chosen), dtype=torch.float32)
    for alpha in (-1.0, 0.5, 0.996, 1.004, 3.0) if divergence == "alpha_divergence" else (0.5,):
        for beta in (0.01, 1.0):
            policy = pairs(list(chosen), list(rejected), dtype=torch.float32, requires_grad=True)
            loss = PAIR_LOSSES[name](policy, ref, **offered(beta, 0.1, divergence, alpha)).loss
            loss.sum().backward()
            assert torch.isfinite(loss).all()
            for leaf in (policy.chosen_logps, policy.rejected_logps):
                assert leaf.grad is None or torch.isfinite(leaf.grad).all()


def test_half_precision_is_computed_in_float32():
    """r_c = -100 + 0.25 has no place in bf16, where steps are 0.5 at that size; d = -99.75 + 101 = 1.25."""
    policy, ref = pairs([-100.0], [-101.0], dtype=torch.bfloat16), pairs([-0.25], [0.0], dtype=torch.bfloat16)
    loss = PAIR_LOSSES["sigmoid"](policy, ref, beta=0.1).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-log_s(0.125), rel=1e-6)


# ---- what the losses do to a policy ---------------------------------------------------------------------------------


def bandit_gap(name: str, steps: int, lr: float, beta: float = 0.5) -> float:
    """Log-ratio of arm 0 less that of arm 1 after gradient descent; two arms, uniform reference, arm 0 always wins."""
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    uniform = torch.full((1,), -math.log(2), dtype=torch.float64)
    ref = PairScores(uniform, uniform, one, one, -uniform, one[0])
    for _ in range(steps):
        logps = logits.log_softmax(0)
        policy = PairScores(logps[:1], logps[1:], one, one, -logps[:1], one[0])
        (gradient,) = torch.autograd.grad(PAIR_LOSSES[name](policy, ref, beta=beta).loss.sum(), logits)
        with torch.no_grad():
            logits -= lr * gradient
    return (logits[0] - logits[1]).item()


def test_ipo_stops_and_dpo_runs_away_on_deterministic_preferences():
    """IPO's optimum is the gap 1 / (2 beta) = 1. DPO's gap x obeys dx/dt = 2 lr beta s(-beta x), so about 2 log t."""
    assert bandit_gap("ipo", 100, lr=0.1) == pytest.approx(1.0, abs=1e-6)
    early, late = bandit_gap("sigmoid", 200, lr=0.5), bandit_gap("sigmoid", 2000, lr=0.5)
    assert early > 5
    assert late - early == pytest.approx(2 * math.log(10), rel=0.1)


# ---- divergences, reference, combination ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIR_LOSS_NAMES)
def test_the_divergence_changes_the_value_or_is_refused(name):
    """Report R142. `sft` alone is refused by the check of the config; beside another loss it has no divergence."""
    policy, ref, _ = random_pairs(21)
    values = {}
    for divergence in DIVERGENCES:
        hyper = offered(eps=0.1, divergence=divergence)
        if divergence != "reverse_kl" and name not in TAKES_DIVERGENCE:
            with pytest.raises(ConfigError, match=divergence):
                validate_pair_losses(name, label_smoothing=0, f_divergence_type=divergence)
            if name != "sft":
                with pytest.raises(ConfigError, match=f"{name}.*{divergence}"):
                    PAIR_LOSSES[name](policy, ref, **hyper)
            continue
        values[divergence] = PAIR_LOSSES[name](policy, ref, **hyper).loss
    if name in TAKES_DIVERGENCE:
        for a in DIVERGENCES:
            for b in DIVERGENCES:
                assert a == b or (values[a] - values[b]).abs().max() > 1e-3


@pytest.mark.parametrize("name", TAKES_DIVERGENCE)
def test_an_unknown_divergence_is_refused(name):
    policy, ref, _ = random_pairs(1)
    with pytest.raises(ConfigError, match="js_divergence"):
        PAIR_LOSSES[name](policy, ref, **offered(eps=0.1, divergence="js_divergense"))


@pytest.mark.parametrize("name", [n for n in PAIR_LOSS_NAMES if n not in REFERENCE_FREE])
def test_a_missing_reference_is_named(name):
    policy, _, _ = random_pairs(1)
    with pytest.raises(ValueError, match="ref is None"):
        PAIR_LOSSES[name](policy, None, **offered(eps=0.1))


@pytest.mark.parametrize(
    ("name", "eps"), [("sigmoid", 1.1), ("aot", -0.1), ("exo_pair", 0.0), ("exo_pair", 1.0), ("robust", 0.5)]
)
def test_smoothing_out_of_range_is_refused(name, eps):
    policy, ref, _ = random_pairs(1)
    with pytest.raises(ConfigError, match=f"{name}.*label_smoothing"):
        PAIR_LOSSES[name](policy, ref, **offered(eps=eps))


def test_implicit_rewards():
    """beta (l - l_ref), whatever else is set; without a reference beta l."""
    policy, ref = pairs([-1.0, -2.0], [-4.0, -4.5]), pairs([-3.0, -1.0], [-3.0, -5.0])
    chosen, rejected = implicit_rewards(policy, ref, 0.5)
    assert chosen.tolist() == [1.0, -0.5]
    assert rejected.tolist() == [-0.5, 0.25]
    assert implicit_rewards(policy, None, 0.5)[1].tolist() == [-2.0, -2.25]


def test_weighted_sum_of_losses():
    """sum_k w_k loss_k, then the weight of the pair; no gradient into the weight; metrics joined."""
    policy, ref, x = random_pairs(8, size=3)

    def length_gap(policy, ref, *, beta, **_):
        gap = policy.chosen_lengths - policy.rejected_lengths
        return LossOutput(gap, {"length_gap": gap})

    pair_weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    losses = [(PAIR_LOSSES["sigmoid"], 0.8), (PAIR_LOSSES["sft"], 0.2), (length_gap, 1.0)]
    policy.chosen_logps.requires_grad_()
    output = weighted_pair_loss(losses, policy, ref, pair_weights_B=pair_weights, **offered())
    dpo = loop_losses("sigmoid", x, beta=0.1, eps=0, tau=1, divergence="reverse_kl", alpha=0)
    nll = loop_losses("sft", x)
    want = [w * (0.8 * a + 0.2 * b + c - d) for w, a, b, c, d in zip([0.5, 1, 2], dpo, nll, x["nc"], x["nr"])]
    assert output.loss.tolist() == pytest.approx(want)
    assert output.metrics["length_gap"].tolist() == [c - d for c, d in zip(x["nc"], x["nr"])]
    output.loss.sum().backward()
    assert pair_weights.grad is None


@pytest.mark.parametrize(
    ("returned", "said"),
    [(torch.zeros(3), "Tensor"), (LossOutput(torch.zeros(())), "one value per pair"), (None, "NoneType")],
)
def test_a_loss_that_returns_something_else_is_named(returned, said):
    policy, ref, _ = random_pairs(8, size=3)
    with pytest.raises(ConfigError, match=said):
        weighted_pair_loss([(lambda policy, ref, **_: returned, 1.0)], policy, ref, **offered())
