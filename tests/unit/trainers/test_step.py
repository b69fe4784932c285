"""The step that all trainers share: nothing in it waits for the device, and nothing that a user gave is changed."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from preftune.models import head
from tests.support.trainers import build as build_trainer

ROUNDS = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
OPTIONS = {
    "sft": {},
    "dpo": {"ld_alpha": 0.5, "use_weighting": True},
    "kto": {},
    "reward": {"center_rewards_coefficient": 0.1},
    "grpo": ROUNDS | {"off_policy_mask_threshold": 0.1, "delta": 4.0},
    "rloo": ROUNDS,
}


def build(folder, kind, tokenizer, **changes):
    common = {"max_steps": 2, "gradient_accumulation_steps": 2}
    return build_trainer(folder, kind, tokenizer, **common | OPTIONS[kind] | changes)


class Waits(TorchDispatchMode):
    """Counts what would wait for a GPU: a number read on the host, a shape that depends on values.

    Not in code that runs on a CPU alone, and not in the probe, which looks at a model once.
    """

    ELSEWHERE = ("cpu_kernel.py", "probe.py")
    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "bincount")

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(t is not None and t.dtype == torch.bool for t in _indices(args))
        if (by_mask or name.startswith(self.NAMES)) and not self._is_elsewhere():
            self.found.append(name)
        return func(*args, **(kwargs or {}))

    def _is_elsewhere(self):
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.endswith(self.ELSEWHERE):
            frame = frame.f_back
        return frame is not None


def _indices(args):
    return args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_step_does_not_wait_for_the_device(tmp_path, tokenizer, kind, monkeypatch):
    """P5: metrics are sums on the device; numbers are read when they are logged, and once a step to find NaN."""
    # on CPU there is a quicker way, which looks at values
    monkeypatch.setattr(head, "_is_top1", lambda logps, targets: (logps.argmax(-1) == targets).float())
    trainer = build(tmp_path, kind, tokenizer, attention_layout="tree")
    step, found = trainer.training_step, []

    def watched(*args, **kwargs):
        with Waits() as waits:
            loss = step(*args, **kwargs)
        found.append(waits.found)
        return loss

    trainer.training_step = watched
    trainer.train()
    assert found == [[]] * 4


def test_what_waits_is_found():
    with Waits() as waits:
        float(torch.ones(1))
        torch.ones(3)[torch.ones(3) > 0]
    assert waits.found == ["_local_scalar_dense", "index"]


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_was_given_is_left_as_it_was(tmp_path, make_tokenizer, kind):
    """S6: tokenizer, adapter config and options can be used again, by another trainer too."""
    tokenizer, lora = make_tokenizer("no_pad"), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=None)
    before = tokenizer.special_tokens_map, tokenizer.chat_template, tokenizer.padding_side, lora.to_dict()
    trainer = build(tmp_path, kind, tokenizer, peft_config=lora, max_steps=1)
    args = copy.deepcopy(trainer.args.to_dict())
    trainer.train()
    assert before == (
        tokenizer.special_tokens_map, tokenizer.chat_template, tokenizer.padding_side, lora.to_dict()
    )  # fmt: skip
    assert trainer.args.to_dict() == args
