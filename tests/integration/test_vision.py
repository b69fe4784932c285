"""Vision-language models in SFT, DPO and KTO: scores are those of a plain forward on the processor's output."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from preftune import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from preftune.data.collate import PreferenceCollator
from preftune.data.tokenize import prepare_preference
from preftune.data.tree import select_branch, select_prompts
from preftune.errors import ConfigError
from preftune.models.logprobs import choose_layout, token_scores
from preftune.models.structure import unwrap
from tests.support.runs import digest, logged, options
from tests.support.vision import VISION_FAMILIES, picture, tiny_vlm

QUESTION, GOOD, BAD = "What is the capital of France?", "The capital is Paris.", "I do not know."
SHOWN = [[picture(1)], [], [picture(2, 8, 20), picture(3)], [picture(4)]]


@pytest.fixture(scope="module")
def families():
    return {family: tiny_vlm(family) for family in VISION_FAMILIES}


def turns(role, text, rows):
    return [[{"role": role, "content": f"{text}{'!' * row}"}] for row in range(rows)]


def pairs(shown=SHOWN):
    sides = {"prompt": ("user", QUESTION), "chosen": ("assistant", GOOD), "rejected": ("assistant", BAD)}
    rows = {side: turns(role, text, len(shown)) for side, (role, text) in sides.items()}
    return Dataset.from_dict({**rows, "images": shown})


def labelled(shown=SHOWN):
    rows = {"prompt": turns("user", QUESTION, len(shown)), "completion": turns("assistant", GOOD, len(shown))}
    return Dataset.from_dict({**rows, "label": [n % 2 == 0 for n in range(len(shown))], "images": shown})


def tree_of(processor, shown=SHOWN):
    rows = prepare_preference(pairs(shown), processor.tokenizer, processor=processor).dataset
    return PreferenceCollator(processor)(list(rows))["tree"]


def scores_of(model, tree):
    with torch.no_grad():
        return token_scores(model, tree, layout="padded").branch_logps


@torch.no_grad()
def plain_logps(model, processor, row, shown, answer):
    """Log-probability of an answer by a forward of transformers alone, one text at a time."""
    blocks = [{"type": "image"}] * len(shown) + [{"type": "text", "text": QUESTION + "!" * row}]
    prompt = [{"role": "user", "content": blocks}]
    whole = [*prompt, {"role": "assistant", "content": [{"type": "text", "text": answer + "!" * row}]}]
    texts = [
        processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=len(messages) == 1)
        for messages in (prompt, whole)
    ]
    images = [shown] if shown else None
    short, long = (
        processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt") for text in texts
    )
    logps = model(**long).logits[0].double().log_softmax(-1)
    ids, start = long["input_ids"][0], short["input_ids"].shape[1]
    return sum(logps[t - 1, ids[t]].item() for t in range(start, len(ids)))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_scores_equal_a_plain_forward_on_the_processors_output(families, family):
    model, processor = families[family]
    scores = scores_of(model, tree_of(processor))
    expected = [
        plain_logps(model, processor, row, shown, answer) for row, shown in enumerate(SHOWN) for answer in (GOOD, BAD)
    ]
    torch.testing.assert_close(scores.double(), torch.tensor(expected, dtype=torch.float64), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_image_matters_and_parts_of_a_tree_bring_their_own(families, family):
    model, processor = families[family]
    tree = tree_of(processor)
    scores = scores_of(model, tree)
    other = scores_of(model, tree_of(processor, [[picture(9)], *SHOWN[1:]]))
    assert (scores - other)[:2].abs().min() > 1e-3
    torch.testing.assert_close(scores[2:], other[2:], atol=1e-4, rtol=0)
    for prompts in ([2], [3, 0], [1]):
        chosen = [branch for prompt in prompts for branch in (2 * prompt, 2 * prompt + 1)]
        part = scores_of(model, select_prompts(tree, prompts))
        torch.testing.assert_close(part, scores[chosen], atol=1e-4, rtol=0)
    torch.testing.assert_close(scores_of(model, select_branch(tree, 1)), scores[1::2], atol=1e-4, rtol=0)


def test_the_tree_layout_is_refused_for_images_and_auto_does_not_take_it(families):
    model, processor = families["llava"]
    with pytest.raises(ConfigError, match="padded"):
        token_scores(model, tree_of(processor), layout="tree")
    with pytest.raises(ConfigError, match="the rows have images"):
        choose_layout(model, "tree", images=True)
    choice = choose_layout(model, "auto", images=True)
    assert choice.layout == "padded" and "images" in choice.reason


# --- DPO --------------------------------------------------------------------------------------------------------------


def lora():
    return LoraConfig(r=4, target_modules=r".*(language_model|text_model).*\.[qv]_proj")


def dpo(tmp_path, family="llava", peft_config=None, **changes):
    model, processor = tiny_vlm(family)
    for name, parameter in model.named_parameters():
        if "vision" in name or "visual" in name:
            parameter.requires_grad_(False)
    config = DPOConfig(**options(tmp_path, **{"per_device_train_batch_size": 4, "max_steps": 1, **changes}))
    return DPOTrainer(model, args=config, train_dataset=pairs(), processing_class=processor, peft_config=peft_config)


@pytest.mark.parametrize("form", ["copy", "lora", "stored"])
def test_dpo_starts_at_log_two_with_a_frozen_tower(tmp_path, caplog, form):
    trainer = dpo(
        tmp_path, peft_config=lora() if form == "lora" else None, precompute_ref_log_probs=form == "stored", max_steps=2
    )
    said = [record.message for record in caplog.records if "attention layout" in record.message]
    assert len(said) == 1 and "padded" in said[0] and "the rows have images" in said[0]
    tower = {n: p.clone() for n, p in trainer.model.named_parameters() if "vision" in n}
    trainer.train()
    first, second = logged(trainer, "loss")
    assert first == pytest.approx(math.log(2), abs=1e-5)
    assert second < first
    assert tower and all(torch.equal(p, dict(trainer.model.named_parameters())[n]) for n, p in tower.items())


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "idefics3"])
def test_a_step_in_parts_equals_the_whole(tmp_path, family):
    whole, split = dpo(tmp_path / "a", family), dpo(tmp_path / "b", family, max_tokens_per_micro_batch=60)
    batch = next(iter(split.get_train_dataloader()))
    assert len(split.micro_batches(batch)) > 1
    whole.train()
    split.train()
    assert logged(whole, "grad_norm") == pytest.approx(logged(split, "grad_norm"), rel=1e-4)
    for (name, a), (_, b) in zip(whole.model.named_parameters(), split.model.named_parameters()):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0, msg=name)


def test_stored_numbers_know_images_apart(tmp_path):
    """Two rows of one text with unlike images have unlike log-probabilities."""
    model, processor = tiny_vlm("llava")
    rows = pairs([[picture(1)]])
    same = Dataset.from_dict({name: rows[name][:] * 2 for name in ("prompt", "chosen", "rejected")})
    same = Dataset.from_dict({**same.to_dict(), "images": [[picture(1)], [picture(5)]]})
    config = DPOConfig(**options(tmp_path, precompute_ref_log_probs=True))
    trainer = DPOTrainer(model, args=config, train_dataset=same, processing_class=processor)
    tree = trainer.data_collator(list(trainer.train_dataset))["tree"]
    stored = trainer.reference.branch_logps(trainer.model, tree, layout="padded")
    torch.testing.assert_close(stored, scores_of(unwrap(trainer.model), tree), atol=1e-5, rtol=0)
    assert (stored[:2] - stored[2:]).abs().min() > 1e-3


def test_evaluation_and_resume(tmp_path):
    def run(folder, steps, **how):
        model, processor = tiny_vlm("idefics3")
        config = DPOConfig(**options(folder, max_steps=steps, save_strategy="steps", save_steps=1))
        trainer = DPOTrainer(model, args=config, train_dataset=pairs(), processing_class=processor)
        trainer.train(**how)
        return trainer

    whole = run(tmp_path / "a", 2)
    run(tmp_path / "b", 1)
    assert digest(run(tmp_path / "b", 2, resume_from_checkpoint=True)) == digest(whole)
    metrics = whole.evaluate(pairs(SHOWN[:2]))
    again = whole.evaluate(whole.prepare_dataset(pairs(SHOWN[:2]), "eval")[0])
    assert metrics["eval_loss"] == pytest.approx(again["eval_loss"])
    assert whole.score_pairs(pairs()).chosen_logps.shape == (4,)


# --- SFT and KTO ------------------------------------------------------------------------------------------------------


def test_sft_learns_and_its_loss_is_that_of_a_plain_forward(tmp_path):
    model, processor = tiny_vlm("idefics3")
    rows = labelled().remove_columns("label")
    expected = [plain_logps(model, processor, row, shown, GOOD) for row, shown in enumerate(SHOWN)]
    config = SFTConfig(**options(tmp_path, per_device_train_batch_size=4, max_steps=3))
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=processor)
    tokens = sum(label != -100 for row in trainer.train_dataset for label in row["labels"])
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(-sum(expected) / tokens, abs=1e-4)
    assert losses[-1] < losses[0]


def test_sft_refuses_to_pack_images(tmp_path):
    model, processor = tiny_vlm("llava")
    config = SFTConfig(**options(tmp_path, packing=True))
    with pytest.raises(ConfigError, match="packing"):
        SFTTrainer(model, config, train_dataset=labelled().remove_columns("label"), processing_class=processor)


def test_kto_compares_with_the_next_answer_about_the_same_image(tmp_path):
    """All rows ask the same, so that only their images make them different prompts."""
    model, processor = tiny_vlm("llava")
    shown = [[picture(n)] for n in range(4)]
    rows = labelled(shown).to_dict() | {"prompt": turns("user", QUESTION, 1) * 4, "images": shown}
    config = KTOConfig(**options(tmp_path, per_device_train_batch_size=4, train_sampling_strategy="sequential"))
    trainer = KTOTrainer(model, args=config, train_dataset=Dataset.from_dict(rows), processing_class=processor)
    tree = next(iter(trainer.get_train_dataloader()))["tree"]
    logps = scores_of(unwrap(trainer.model), tree)[1::2]
    answers = [GOOD + "!" * n for n in (1, 2, 3, 0)]
    expected = [plain_logps(model, processor, 0, shown[row], answer) for row, answer in enumerate(answers)]
    torch.testing.assert_close(logps.double(), torch.tensor(expected, dtype=torch.float64), atol=2e-4, rtol=0)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(0.5, abs=1e-5)


def test_a_checkpoint_loads_by_name(tmp_path):
    model, processor = tiny_vlm("llava")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    config = DPOConfig(**options(tmp_path / "out", max_steps=1))
    trainer = DPOTrainer(str(tmp_path / "model"), args=config, train_dataset=pairs())
    assert type(trainer.model) is type(model) and type(trainer.processing_class) is type(processor)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx([math.log(2)], abs=1e-5)
