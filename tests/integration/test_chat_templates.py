"""Chat templates from a copied one to a model that stops: training on what it would generate, tools, streams."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from datasets import Dataset, IterableDataset

from preftune import SFTConfig, SFTTrainer, clone_chat_template
from tests.support.chat_templates import family_tokenizer
from tests.support.runs import logged, options


def test_a_model_with_a_copied_template_learns_to_stop(tmp_path, tiny_model, make_tokenizer):
    """R054: after training on one row the model says it and stops at the new end token, also when loaded again."""
    family_tokenizer("gemma").save_pretrained(tmp_path / "source")
    tokenizer, model = make_tokenizer("no_template"), copy.deepcopy(tiny_model())
    model, tokenizer, added = clone_chat_template(model, tokenizer, str(tmp_path / "source"), resize_to_multiple_of=8)
    tokenizer.eos_token = "<end_of_turn>"
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    assert tokenizer.eos_token_id in added
    messages = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "four."}]
    changes = {"assistant_only_loss": True, "max_steps": 40, "learning_rate": 2e-2}
    trainer = SFTTrainer(
        model,
        args=SFTConfig(**options(tmp_path / "run", **changes)),
        train_dataset=Dataset.from_list([{"messages": messages}] * 2),
        processing_class=tokenizer,
    )
    trainer.train()
    assert logged(trainer, "loss")[-1] < 0.1
    trainer.save_model(str(tmp_path / "saved"))
    for learnt in (trainer.model, type(model).from_pretrained(tmp_path / "saved")):
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            ids = learnt.eval().generate(**prompt, max_new_tokens=20, do_sample=False)[0]
        assert tokenizer.decode(ids[prompt["input_ids"].shape[1] :]) == "four.<end_of_turn>"


def test_rows_with_tools_and_thinking(tmp_path, tiny_model):
    """Tools as JSON text, options of a row, thinking: all reach the template, and results are not scored."""
    tokenizer = family_tokenizer("qwen3")
    tools = [{"type": "function", "function": {"name": "temp", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "temp", "arguments": {"city": "Oslo"}}}
    turns = [
        {"role": "user", "content": "Cold?"},
        {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Yes."},
    ]
    rows = [
        {"messages": turns, "tools": json.dumps(tools), "chat_template_kwargs": {"enable_thinking": think}}
        for think in (True, False)
    ]
    trainer = SFTTrainer(
        tiny_model(vocab_size=len(tokenizer)),
        args=SFTConfig(**options(tmp_path, assistant_only_loss=True, max_steps=1)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    call_text = '\n<tool_call>\n{"name": "temp", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    empty = "<think>\n\n</think>\n\n"
    for row, prefix in zip(trainer.train_dataset, (empty, "")):
        assert '"name": "temp", "parameters"' in tokenizer.decode(row["input_ids"])
        scored = tokenizer.decode([label for label in row["labels"] if label != -100])
        assert scored == f"<think>\nlook\n</think>\n\n{call_text}{prefix}Yes.<|im_end|>"


@pytest.mark.parametrize("packing", [False, True])
def test_streams_are_shuffled(tmp_path, tiny_model, tokenizer, packing):
    """A shuffled stream has every document once, packed or not, in an order that the seed decides."""

    def rows(seed):
        stream = IterableDataset.from_generator(lambda: ({"input_ids": [10 + n] * (n % 4 + 2)} for n in range(12)))
        args = SFTConfig(**options(tmp_path, shuffle_dataset=True, packing=packing, max_length=8, seed=seed))
        trainer = SFTTrainer(tiny_model(), args=args, train_dataset=stream, processing_class=tokenizer)
        return [row["input_ids"] for row in trainer.train_dataset]

    one, again, other = rows(0), rows(0), rows(1)
    assert one == again != other
    plain = sorted(token for n in range(12) for token in [10 + n] * (n % 4 + 2))
    assert sorted(sum(one, [])) == sorted(sum(other, [])) == plain
