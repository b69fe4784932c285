"""KTO from rows to weights: the baseline is one number a step, however the step is cut, and metrics are honest.

The oracle is a plain forward of every row in float64 (`by_hand`).
"""

from __future__ import annotations

import logging
import math
import signal

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from preftune import KTOConfig, KTOTrainer
from preftune.data.collate import UnpairedCollator
from preftune.data.samplers import epoch_order
from preftune.errors import ConfigError, DataFormatError
from tests.support.runs import die, digest, killed, logged, options

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
SGD = {"optim": "sgd", "learning_rate": 0.5}
EXTRA = ("peft_config", "ref_model", "callbacks", "eval_dataset", "compute_metrics", "data_collator")


@pytest.fixture
def rows(sft_rows, preference_rows):
    """Eight prompts; good and bad answers in turn, but for the last two, which are both bad."""
    sides = ["chosen", "rejected"] * 3 + ["rejected", "rejected"]
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row, side in zip(preference_rows["text"], sides)
    ]


@pytest.fixture
def build(tmp_path, tiny_model, tokenizer):
    def build(rows, *, model=None, folder="run", **changes) -> KTOTrainer:
        extra = {name: changes.pop(name) for name in EXTRA if name in changes}
        return KTOTrainer(
            model=tiny_model() if model is None else model,
            args=KTOConfig(**options(tmp_path / folder, **changes)),
            train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
            processing_class=tokenizer,
            **extra,
        )

    return build


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


FORMS = {
    "frozen_copy": {}, "given": {"ref_model": True}, "disabled_adapter": {"peft_config": LORA},
    "moving_adapter": {"peft_config": LORA, "sync_ref_model": True}, "bema": {"bema_ref_model": True},
    "stored": {"precompute_ref_log_probs": True},
    "stored_lora": {"precompute_ref_log_probs": True, "peft_config": LORA, "gradient_accumulation_steps": 2},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_first_loss_is_one_half(build, tiny_model, rows, form):
    changes = dict(FORMS[form])
    if changes.get("ref_model"):
        changes["ref_model"] = tiny_model()
    trainer = build(rows, max_steps=1, per_device_train_batch_size=3, **changes)
    trainer.train()
    assert logged(trainer, "loss") == [pytest.approx(0.5, abs=1e-6)]
    assert logged(trainer, "kl") == [pytest.approx(0, abs=1e-5)]


def by_hand(policy, ref, tokenizer, rows, places, beta, weights=(1.0, 1.0)):
    """Loss and metrics of one step over `rows[places]`, each paired with the row after it, in float64."""
    policy, ref = policy.double().eval(), ref.double().eval()

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def logits(model, row, completion):
        prompt, answer = ids(row["prompt"]), [*ids(completion), tokenizer.eos_token_id]
        with torch.no_grad():
            out = model(torch.tensor([prompt + answer])).logits[0][len(prompt) - 1 : -1]
        return out, sum(out.log_softmax(-1)[i, t].item() for i, t in enumerate(answer))

    strays, values, entropies = [], [], []
    tokens: dict[bool, list[float]] = {True: [], False: []}
    for place in places:
        row, other = rows[place], rows[(place + 1) % len(rows)]
        strays.append(logits(policy, row, other["completion"])[1] - logits(ref, row, other["completion"])[1])
        out, logp = logits(policy, row, row["completion"])
        values.append((logp, logp - logits(ref, row, row["completion"])[1], row["label"]))
        tokens[row["label"]] += out.mean(-1).tolist()
        entropies += torch.distributions.Categorical(logits=out).entropy().tolist()
    kl = max(0.0, sum(strays) / len(strays))
    loss = 0.0
    for _, ratio, label in values:
        z = beta * (ratio - kl) * (1 if label else -1)
        loss += weights[not label] / (1 + math.exp(z)) / len(values)
    sides = {"chosen": True, "rejected": False}
    metrics = {"loss": loss, "kl": kl, "entropy": np.mean(entropies)}
    for side, wanted in sides.items():
        of = [(logp, ratio) for logp, ratio, label in values if label is wanted]
        metrics[f"logps/{side}"] = np.mean([logp for logp, _ in of])
        metrics[f"rewards/{side}"] = beta * np.mean([ratio for _, ratio in of])
        metrics[f"logits/{side}"] = np.mean(tokens[wanted])
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    metrics["rewards/accuracies"] = np.mean([(ratio > 0) == label for _, ratio, label in values])
    return metrics


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("together", [True, False])
def test_a_step_by_hand(build, tiny_model, tokenizer, rows, layout, together, monkeypatch):
    """R139 too: entropy and logits are means over completion tokens, whatever the padding; never mismatched ones."""
    monkeypatch.setattr(KTOTrainer, "_fits_one_forward", lambda self, tree: together)
    common = {"max_steps": 1, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
    trainer = build(
        rows, model=tiny_model(seed=1), ref_model=tiny_model(), attention_layout=layout, desirable_weight=1.5,
        undesirable_weight=0.75, beta=0.05, **common,
    )  # fmt: skip
    trainer.train()
    wanted = by_hand(tiny_model(seed=1), tiny_model(), tokenizer, rows, range(4), 0.05, (1.5, 0.75))
    assert wanted["kl"] > 1
    got = {name: logged(trainer, name)[0] for name in wanted}
    assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    own = sum(
        len(tokenizer(r["prompt"] + r["completion"], add_special_tokens=False)["input_ids"]) + 1 for r in rows[:4]
    )
    assert logged(trainer, "num_tokens")[0] == own


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_how_a_step_is_cut_changes_nothing(build, tiny_model, rows, loss, monkeypatch):
    """Batch 4, 2 x 2, 4 x 1, and a token budget; one forward for both completions, or one for each."""

    def after(**cut):
        changes = {"model": tiny_model(seed=1), "ref_model": tiny_model(), "beta": 0.01, "max_grad_norm": 0}
        trainer = build(rows, loss_type=loss, max_steps=3, **changes, **SGD, **cut)
        trainer.train()
        return weights(trainer.model), [logged(trainer, n) for n in ("loss", "kl", "rewards/margins", "num_tokens")]

    monkeypatch.setattr(KTOTrainer, "_fits_one_forward", lambda self, tree: True)
    whole, logs = after(per_device_train_batch_size=4)
    assert (whole - weights(tiny_model(seed=1))).abs().max() > 1e-3
    assert loss != "kto" or max(logs[1]) > 1
    monkeypatch.setattr(KTOTrainer, "_fits_one_forward", lambda self, tree: False)
    for cut in (
        {"per_device_train_batch_size": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4, "max_tokens_per_micro_batch": 60},
    ):
        other, other_logs = after(**cut)
        assert (other - whole).abs().max() < 2e-6, cut
        for one, two in zip(logs, other_logs, strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_shuffled_rows_take_the_completion_of_the_next(build, rows):
    """What the model really gets in each batch of two epochs, against the order of the epoch."""
    trainer = build(rows, num_train_epochs=2, max_steps=-1, per_device_train_batch_size=3)
    seen, step = [], trainer.training_step

    def spy(model, inputs, *args):
        layout, ids = inputs["tree"].layout, inputs["tree"].input_ids.tolist()
        start = 0
        for prompt, (own, other) in layout:
            end = start + prompt + own
            seen.append((ids[start + prompt : end], ids[end : end + other]))
            start = end + other
        return step(model, inputs, *args)

    trainer.training_step = spy
    trainer.train()
    ids = list(trainer.train_dataset["completion_ids"])
    wanted = []
    for epoch in range(2):
        order = epoch_order(8, 0, epoch)
        wanted += [(ids[row], ids[order[(place + 1) % 8]]) for place, row in enumerate(order)]
    assert seen == wanted


def test_one_label_alone(build, rows):
    """R137: finite numbers only; a side without rows in a log is left out."""
    good = [row | {"label": True} for row in rows]
    trainer = build(good, max_steps=2)
    trainer.train()
    assert not logged(trainer, "rewards/rejected") and not logged(trainer, "rewards/margins")
    one_bad = [*good[:7], rows[7]]
    trainer = build(one_bad, max_steps=4, train_sampling_strategy="sequential")
    trainer.train()
    assert len(logged(trainer, "rewards/chosen")) == 4
    assert [e["step"] for e in trainer.state.log_history if "rewards/rejected" in e and "loss" in e] == [4]
    numbers = [v for entry in trainer.state.log_history for v in entry.values()]
    assert all(math.isfinite(v) for v in numbers)


def test_a_batch_of_one_and_a_log_over_batches_of_one_label(build, tiny_model, rows):
    """The margin is the difference of the means over the whole window, here of eight batches of one row."""
    common = {"max_steps": 8, "train_sampling_strategy": "sequential", "learning_rate": 0.0}
    trainer = build(rows, ref_model=tiny_model(seed=1), per_device_train_batch_size=1, logging_steps=8, **common)
    trainer.train()
    whole = build(rows, ref_model=tiny_model(seed=1), per_device_train_batch_size=8, **common | {"max_steps": 1})
    whole.train()
    assert logged(trainer, "rewards/margins")[0] == pytest.approx(logged(whole, "rewards/margins")[0], rel=1e-4)
    assert logged(trainer, "logits/rejected")[0] == pytest.approx(logged(whole, "logits/rejected")[0], rel=1e-4)


def test_labels_may_be_numbers(build, rows):
    """R140."""
    digests = set()
    for kind in (bool, int):
        trainer = build([row | {"label": kind(row["label"])} for row in rows], max_steps=2)
        trainer.train()
        digests.add(digest(trainer))
    assert len(digests) == 1


def test_large_vocabulary(build, tiny_model, rows):
    """R140."""
    model = tiny_model(vocab_size=160_000, hidden_size=8, intermediate_size=8, num_attention_heads=2)
    trainer = build(rows, model=model, max_steps=1)
    trainer.train()
    assert math.isfinite(logged(trainer, "loss")[0])


def test_nan_stops_the_run(build, tiny_model, rows):
    """W10: also where only the mismatched completion of a row, which has no gradient, is no number; eval shows it."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    broken = build(rows, model=model)
    metrics = broken.evaluate(Dataset.from_list(rows))
    assert math.isnan(metrics["eval_loss"]) and math.isnan(metrics["eval_kl"])
    with pytest.raises(FloatingPointError, match="step 1"):
        broken.train()
    trainer = build(rows, gradient_accumulation_steps=2)
    trainer._stray_logps = lambda model, tree: torch.full((tree.num_prompts,), float("nan"))
    with pytest.raises(FloatingPointError, match="step 1"):
        trainer.train()


def test_evaluation_is_of_the_whole_set(build, tiny_model, tokenizer, rows):
    """W11: batches of 1, 3 and 8 give the same numbers, those of one batch by hand; training is left alone."""
    quiet = build(rows, max_steps=2, folder="quiet")
    quiet.train()
    watched = build(
        rows, max_steps=2, folder="watched", eval_dataset=Dataset.from_list(rows), eval_strategy="steps", eval_steps=1
    )
    watched.train()
    assert digest(watched) == digest(quiet)
    wanted = by_hand(tiny_model(seed=1), tiny_model(), tokenizer, rows, range(8), 0.1)
    assert wanted["kl"] > 0.1
    for size in (1, 3, 8):
        trainer = build(rows, model=tiny_model(seed=1), ref_model=tiny_model(), per_device_eval_batch_size=size)
        metrics = trainer.evaluate(Dataset.from_list(rows))
        assert {name: metrics[f"eval_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5), size


def test_compute_metrics_sees_completions_alone(build, rows):
    shapes = []

    def count(prediction):
        shapes.append(np.asarray(prediction.label_ids != -100).sum())
        return {"rows": len(prediction.label_ids)}

    trainer = build(rows, compute_metrics=count, eval_dataset=Dataset.from_list(rows), per_device_eval_batch_size=3)
    assert trainer.evaluate()["eval_rows"] == 8
    assert shapes == [sum(map(len, trainer.eval_dataset["completion_ids"]))]


MOVING = {
    "sync": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "stored": {"precompute_ref_log_probs": True},
    "stream": {"stream": True},
}


@pytest.mark.parametrize("form", MOVING)
def test_resume_is_exact(build, rows, form):
    """Six steps of two epochs at once, and over checkpoints in the first and in the second epoch."""
    common = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "logging_steps": 4, "max_grad_norm": 1.0}
    common |= {"gradient_accumulation_steps": 2} | MOVING[form]
    if common.pop("stream", False):
        data, common["gradient_accumulation_steps"] = Dataset.from_list(rows).to_iterable_dataset(), 2
    else:
        data = rows
    straight = build(data, folder="a", **common)
    straight.train()
    for step in (1, 3):
        torch.manual_seed(99 + step)
        resumed = build(data, folder=f"b{step}", **common)
        resumed.train(resume_from_checkpoint=straight.args.output_dir + f"/checkpoint-{step}")
        assert digest(resumed) == digest(straight)
        for name in ("loss", "kl", "rewards/margins", "num_tokens"):
            assert logged(resumed, name)[-1] == logged(straight, name)[-1]


def test_killed_within_a_step(build, rows):
    """Dead at its sixth micro-batch, between the two of step 3, resumed from the checkpoint of step 2."""
    common = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    straight = build(rows, folder="a", **common)
    straight.train()

    def run() -> None:
        trainer = build(rows, folder="b", **common)
        step, calls = trainer.training_step, []

        def fatal(*args):
            calls.append(args)
            return die() if len(calls) == 6 else step(*args)

        trainer.training_step = fatal
        trainer.train()

    assert killed(run) == signal.SIGKILL
    resumed = build(rows, folder="b", **common)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(straight)


def test_streams_train_as_sets_do_in_their_order(build, rows):
    data = Dataset.from_list(rows)
    common = {"max_steps": 4, "per_device_train_batch_size": 2}
    stream = build(data.to_iterable_dataset(), folder="a", **common)
    stream.train()
    fixed = build(data, folder="b", train_sampling_strategy="sequential", **common)
    fixed.train()
    assert digest(stream) == digest(fixed)


def test_what_kto_is_for(build, rows):
    """Desirable completions rise against the reference, others fall; held-out rows are told apart."""
    data = Dataset.from_list(rows)
    trainer = build(data, max_steps=12, per_device_train_batch_size=8, eval_dataset=data)
    before = trainer.score_rows(data)
    assert before.separation.value == 0.5 and not before.rewards.any()
    trainer.train()
    after = trainer.score_rows(data)
    assert after.separation.value > 0.9
    assert after.rewards[after.is_desirable].mean() > 0 > after.rewards[~after.is_desirable].mean()


def test_weights_decide_what_moves_most(build, rows):
    """2 good rows and 6 bad: with undesirable_weight 1 the bad ones fall more than with 1/3."""
    few = [row | {"label": place in (0, 4)} for place, row in enumerate(rows)]

    def fall(**weights):
        trainer = build(few, max_steps=4, per_device_train_batch_size=8, **SGD | {"learning_rate": 0.05}, **weights)
        trainer.train()
        return logged(trainer, "rewards/rejected")[-2]

    assert fall() < fall(undesirable_weight=1 / 3) < 0


def test_imbalance_is_said_with_numbers(build, rows, caplog):
    with caplog.at_level(logging.WARNING):
        build(rows)
    assert "train_dataset has 3 desirable and 5 undesirable rows" in caplog.text
    assert "desirable_weight in [1.67, 2.22]" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build(rows, desirable_weight=2.0)
    assert "desirable_weight" not in caplog.text


def test_one_prompt_is_refused_and_apo_takes_it(build, rows):
    same = [row | {"prompt": "Say something."} for row in rows]
    with pytest.raises(DataFormatError, match=r"same prompt.*apo_zero_unpaired"):
        build(same)
    trainer = build(same, loss_type="apo_zero_unpaired", max_steps=1)
    trainer.train()
    assert logged(trainer, "loss") == [pytest.approx(0.5, abs=1e-6)] and logged(trainer, "kl") == [0.0]


def test_bad_data_and_collators_are_named(build, rows):
    with pytest.raises(DataFormatError, match="'label'"):
        build([{"prompt": "a", "completion": "b"}])

    class OwnOnly(UnpairedCollator):
        def __call__(self, rows):
            return super().__call__([{k: v for k, v in row.items() if k != "mismatched_ids"} for row in rows])

    with pytest.raises(DataFormatError, match="2 branches for 2 rows.*then that of another prompt"):
        build(rows, data_collator=OwnOnly()).train()
    with pytest.raises(ConfigError, match="random"):
        build(rows, train_sampling_strategy="group_by_length")


def test_experts_are_balanced_over_the_rows_own_tokens(build, tiny_model, rows):
    """The loss with the router's term is the plain loss plus coefficient times `aux_loss`, which is that of `apo`.

    Prompts are long, so that one forward for both completions would be the cheaper way.
    """
    rows, logs = [row | {"prompt": row["prompt"] * 6} for row in rows], {}
    for loss in ("kto", "apo_zero_unpaired"):
        for coef in (0.0, 0.1):
            trainer = build(
                rows[:4], model=tiny_model("qwen3_moe"), loss_type=loss, router_aux_loss_coef=coef, max_steps=1,
                per_device_train_batch_size=4,
            )  # fmt: skip
            trainer.train()
            logs[loss, coef] = logged(trainer, "loss")[0], *logged(trainer, "aux_loss")
    for loss in ("kto", "apo_zero_unpaired"):
        assert logs[loss, 0.1][0] == pytest.approx(logs[loss, 0.0][0] + 0.1 * logs[loss, 0.1][1], rel=1e-5)
    assert logs["kto", 0.1][1] == pytest.approx(logs["apo_zero_unpaired", 0.1][1], rel=1e-5)
