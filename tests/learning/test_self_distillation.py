"""SDFT and SDPO teach a tiny model the next letter of the alphabet, which its prompt alone does not hold.

The model begins with one skill: it copies a second letter of its prompt, and guesses where there is only one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from preftune import SDFTConfig, SDFTTrainer, SDPOConfig, SDPOTrainer, SFTConfig, SFTTrainer
from preftune.cli import demo
from tests.support.runs import logged, options

LETTERS = demo.LETTERS
NEXT = dict(zip(LETTERS, LETTERS[1:] + LETTERS[0]))


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def copies(tmp_path: Any, seed: int = 0, steps: int = 150) -> tuple[Any, Any]:
    """The model with its skill, and the tokenizer."""
    tokenizer = demo.build_tokenizer()
    rows = [{"prompt": ask(word), "completion": answer(b)} for a in LETTERS for b in LETTERS for word in (a + b, a)]
    trainer = SFTTrainer(
        model=demo.build_model(tokenizer, seed),
        args=SFTConfig(
            **options(
                tmp_path / "copies", max_steps=steps, learning_rate=3e-3, per_device_train_batch_size=50,
                logging_steps=steps, seed=seed,
            )
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer.model, tokenizer


@torch.no_grad()
def right(model: Any, tokenizer: Any, hint: bool = False) -> float:
    """Share of letters to which the greedy answer is the next one."""
    prompts = [ask(a + NEXT[a] if hint else a) for a in LETTERS]
    ids = torch.tensor(
        [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    )
    answers = tokenizer.convert_ids_to_tokens(model.eval()(ids).logits[:, -1].argmax(-1).tolist())
    return sum(NEXT[a] == answer for a, answer in zip(LETTERS, answers, strict=True)) / len(LETTERS)


def common(folder: Any, **changes: Any) -> dict[str, Any]:
    return options(
        folder, num_generations=8, max_completion_length=2, per_device_train_batch_size=80, logging_steps=5, **changes
    )


@pytest.fixture(scope="module")
def skilled(tmp_path_factory) -> Callable[[int], tuple[Any, Any]]:
    """`skilled(seed)`: a copy of the model, and the tokenizer."""
    torch.set_num_threads(1)
    made: dict[int, tuple[Any, Any]] = {}

    def of(seed: int) -> tuple[Any, Any]:
        if seed not in made:
            made[seed] = copies(tmp_path_factory.mktemp("copies"), seed)
        model, tokenizer = made[seed]
        return copy.deepcopy(model), tokenizer

    return of


def runs(quick: str, names: dict[str, Any]) -> list[Any]:
    """Every name with three seeds; one of them with one seed is quick."""
    slow = pytest.mark.slow
    return [
        pytest.param(name, seed, marks=() if (name, seed) == (quick, 0) else slow)
        for name in names
        for seed in range(3)
    ]


LESSONS: dict[str, dict[str, Any]] = {
    "top": {"distillation_topk": 5, "max_steps": 60},
    "tail": {"distillation_topk": 5, "distillation_add_tail": True, "max_steps": 60},
    "forward": {"distillation_topk": 10, "distillation_alpha": 0.0, "max_steps": 40},
    "all": {"distillation_mode": "full_logits", "distillation_alpha": 0.0, "max_steps": 40},
    "sampled": {
        "distillation_mode": "sampled_token", "distillation_alpha": 1.0, "max_steps": 150, "learning_rate": 5e-4,
    },
}  # fmt: skip


@pytest.mark.parametrize(("lesson", "seed"), runs("forward", LESSONS))
def test_the_answer_is_learned_without_the_context(tmp_path, skilled, lesson, seed):
    model, tokenizer = skilled(seed)
    before = right(model, tokenizer)
    assert right(model, tokenizer, hint=True) == 1.0
    how = {"learning_rate": 1e-3, "teacher_prompt_template": "{prompt}{privileged_context}", "seed": seed}
    trainer = SDFTTrainer(
        model,
        args=SDFTConfig(**common(tmp_path, **how | LESSONS[lesson])),
        train_dataset=Dataset.from_list([{"prompt": ask(a), "privileged_context": b} for a, b in NEXT.items()]),
        processing_class=tokenizer,
    )
    trainer.train()
    losses, after = logged(trainer, "sdft/distillation_loss"), right(trainer.model, tokenizer)
    print(f"\n{lesson}, seed {seed}: greedy {before} -> {after}; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert before <= 0.4 and after >= 0.9
    assert losses[-1] < losses[0] / 3


ATTEMPTS: dict[str, dict[str, Any]] = {
    "forward": {
        "distillation_mode": "topk_logits", "distillation_topk": 10, "distillation_alpha": 0.0, "max_steps": 80,
    },
    "sampled": {"max_steps": 200},  # what is never drawn any more is never learned
    "half": {"distillation_weight": 0.5, "max_steps": 200},
}  # fmt: skip


@pytest.mark.parametrize(("attempt", "seed"), runs("forward", ATTEMPTS))
def test_the_reward_rises(tmp_path, skilled, attempt, seed):
    def is_next(completions: list[Any], word: list[str], **_: Any) -> list[float]:
        return [float(turns[0]["content"] == NEXT[a]) for turns, a in zip(completions, word, strict=True)]

    model, tokenizer = skilled(seed)
    before = right(model, tokenizer)
    how = {
        "learning_rate": 5e-4, "teacher_model_kind": "base", "solution_template": "{solution}", "seed": seed,
        "reprompt_template": "{prompt}{solution}{feedback}", "feedback_template": "{feedback}",
    }  # fmt: skip
    trainer = SDPOTrainer(
        model,
        is_next,
        args=SDPOConfig(**common(tmp_path, **how | ATTEMPTS[attempt])),
        train_dataset=Dataset.from_list([{"prompt": ask(a), "word": a} for a in LETTERS]),
        processing_class=tokenizer,
    )
    trainer.train()
    rewards, after = logged(trainer, "reward"), right(trainer.model, tokenizer)
    print(f"\n{attempt}, seed {seed}: greedy {before} -> {after}; reward {' '.join(f'{r:.2f}' for r in rewards)}")
    assert rewards[0] < 0.2 and after >= 0.4
    assert rewards[-1] > (0.35 if attempt == "sampled" else 0.6)
