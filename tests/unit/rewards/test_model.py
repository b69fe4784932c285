"""Reward models: values are those of the classifier's own forward on each text alone, however texts are batched.

Texts go through the tokenizer by hand here, so that special tokens are counted, not assumed.
"""

from __future__ import annotations

import pytest
import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from preftune.errors import ConfigError
from preftune.models.logprobs import LayoutChoice
from preftune.rewards.base import RewardRunner
from preftune.rewards.model import RewardModel
from tests.support.rows import turn

PROMPTS = ["What is the capital of France?"] * 3 + ["Two and two is"] * 2 + ["Say hello."]
COMPLETIONS = [" Paris.", " Rome, I think, and then some.", " Paris.", " four.", " five", " Hello! How can I help you?"]
CHAT_PROMPTS = [[turn("user", p)] for p in PROMPTS]
CHAT_COMPLETIONS = [[turn("assistant", c)] for c in COMPLETIONS]


@torch.no_grad()
def alone(model, rows):
    """Each row through the model's own forward, without padding."""
    return [model(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]


def plain_rows(tokenizer):
    return [tokenizer(p + c)["input_ids"] for p, c in zip(PROMPTS, COMPLETIONS)]


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("budget", [16_384, 60, 1])
def test_texts(tiny_model, tokenizer, monkeypatch, family, budget, layout):
    monkeypatch.setattr("preftune.rewards.model.choose_layout", lambda model: LayoutChoice(layout, ""))
    model = tiny_model(family, head="value")
    reward = RewardModel(model, tokenizer, max_batch_tokens=budget)
    assert reward(PROMPTS, COMPLETIONS) == pytest.approx(alone(model, plain_rows(tokenizer)), abs=1e-4)


@pytest.mark.parametrize("variant", ["plain", "bos", "pad_is_eos", "no_pad"])
def test_messages_have_the_special_tokens_of_the_template_and_no_others(tiny_model, make_tokenizer, variant):
    tokenizer = make_tokenizer(variant)
    model = tiny_model("llama", head="value")
    model.config.pad_token_id = tokenizer.pad_token_id
    rows = [
        tokenizer.apply_chat_template(p + c, tokenize=True, return_dict=False)
        for p, c in zip(CHAT_PROMPTS, CHAT_COMPLETIONS)
    ]
    assert [row.count(tokenizer.bos_token_id) for row in rows] == [int(variant == "bos")] * len(rows)
    values = RewardModel(model, tokenizer)(CHAT_PROMPTS, CHAT_COMPLETIONS)
    assert values == pytest.approx(alone(model, rows), abs=1e-4)
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_texts_begin_with_one_bos(tiny_model, make_tokenizer):
    tokenizer = make_tokenizer("bos")
    model = tiny_model("llama", head="value")
    rows = plain_rows(tokenizer)
    assert all(row.count(tokenizer.bos_token_id) == 1 for row in rows)
    values = RewardModel(model, tokenizer)(PROMPTS, COMPLETIONS)
    assert values == pytest.approx(alone(model, rows), abs=1e-4)
    with_bos = RewardModel(model, tokenizer)(["<bos>" + p for p in PROMPTS], COMPLETIONS)
    assert with_bos == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("pad", [0, 2, None])
def test_texts_that_end_with_eos_where_it_is_also_for_padding(tiny_model, make_tokenizer, pad):
    """HF reads such a row before its EOS, and so do we: that is how the model was trained."""
    tokenizer = make_tokenizer("pad_is_eos")
    model = tiny_model("llama", head="value")
    model.config.pad_token_id = pad
    completions = [c + "<eos>" for c in COMPLETIONS]
    rows = [tokenizer(p + c)["input_ids"] for p, c in zip(PROMPTS, completions)]
    assert rows[0][-1] == 2
    assert RewardModel(model, tokenizer)(PROMPTS, completions) == pytest.approx(alone(model, rows), abs=1e-4)


def test_padded_batch_of_hf(tiny_model, tokenizer):
    model = tiny_model("llama", head="value")
    batch = tokenizer(
        [p + c for p, c in zip(PROMPTS, COMPLETIONS)], padding=True, padding_side="right", return_tensors="pt"
    )
    with torch.no_grad():
        wanted = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()
    assert RewardModel(model, tokenizer)(PROMPTS, COMPLETIONS) == pytest.approx(wanted, abs=1e-4)


def test_completions_of_a_prompt_share_its_tokens(tiny_model, tokenizer, monkeypatch):
    from preftune.rewards import model as module

    trees = []
    original = module.branch_values
    monkeypatch.setattr(module, "branch_values", lambda m, tree, **k: trees.append(tree) or original(m, tree, **k))
    RewardModel(tiny_model("llama", head="value"), tokenizer)(["What is the capital of France?"] * 8, [" Paris."] * 8)
    (tree,) = trees
    prompt = len(tokenizer("What is the capital of France?")["input_ids"])
    answer = len(tokenizer("What is the capital of France? Paris.")["input_ids"]) - prompt
    assert tree.num_branches == 8
    assert tree.num_tokens <= prompt + 8 * answer


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_budget_is_kept(tiny_model, tokenizer, monkeypatch, layout):
    """In tokens that the model is given: padded rows count with their padding."""
    from preftune.rewards import model as module

    model, sizes = tiny_model("llama", head="value"), []
    model.register_forward_pre_hook(lambda m, a, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True)
    monkeypatch.setattr(module, "choose_layout", lambda model: LayoutChoice(layout, ""))
    prompts = [f"{number} and " for number in range(12)]
    answers = [" again and again" * (number % 4) + "." for number in range(12)]
    RewardModel(model, tokenizer, max_batch_tokens=60)(prompts, answers)
    assert len(sizes) > 1
    assert max(sizes) <= 60


def test_long_texts_lose_their_beginning_and_are_counted(tiny_model, tokenizer, caplog):
    model = tiny_model("llama", head="value", max_position_embeddings=16)
    reported = {}
    rows = plain_rows(tokenizer)
    long = sum(len(row) > 16 for row in rows)
    assert 0 < long < len(rows)
    reward = RewardModel(model, tokenizer, name="rm")
    for _ in range(2):
        values = reward(PROMPTS, COMPLETIONS, log_metric=reported.__setitem__)
    assert values == pytest.approx(alone(model, [row[-16:] for row in rows]), abs=1e-4)
    assert reported == {"rewards/rm/truncated": long / len(rows)}
    assert sum("lose their beginning" in r.getMessage() for r in caplog.records) == 1
    assert RewardModel(model, tokenizer, max_length=5)(PROMPTS, COMPLETIONS) == pytest.approx(
        alone(model, [row[-5:] for row in rows]), abs=1e-4
    )


def test_an_empty_text_has_no_value(tiny_model, tokenizer):
    model = tiny_model("llama", head="value")
    values = RewardModel(model, tokenizer)(["", "a", "a"], ["", "", "b"])
    assert values[0] is None
    assert values[1:] == pytest.approx(
        alone(model, [tokenizer("a")["input_ids"], tokenizer("ab")["input_ids"]]), abs=1e-4
    )
    assert RewardModel(model, tokenizer)([], []) == []


def test_eval_mode_without_gradients(tiny_model, tokenizer):
    model = tiny_model("gpt2", head="value", resid_pdrop=0.5).train()
    reward = RewardModel(model, tokenizer)
    assert reward(PROMPTS, COMPLETIONS) == reward(PROMPTS, COMPLETIONS)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model, tokenizer):
    path = tmp_path_factory.mktemp("models") / "my-reward"
    tiny_model("llama", head="value").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_by_folder_in_the_runner(folder, tiny_model, tokenizer):
    runner = RewardRunner([folder, lambda completions: [0.0] * len(completions)])
    table = runner.run(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1]] * 6, columns={"gold": [1] * 6})
    assert table.names == ["my-reward", "<lambda>"]
    wanted = alone(tiny_model("llama", head="value"), plain_rows(tokenizer))
    assert table.values[:, 0].tolist() == pytest.approx(wanted, abs=1e-4)
    assert table.metrics["rewards/my-reward/truncated"] == 0
    (model,) = runner.models
    assert model.model.dtype == torch.float32


def test_modules_in_the_runner_have_names_and_tokenizers_of_their_own(tiny_model, tokenizer):
    first, second = tiny_model("llama", head="value"), tiny_model("llama", head="value", seed=1)
    table = RewardRunner([first, second], processing_classes=[tokenizer, tokenizer]).run(
        prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1]] * 6
    )
    assert table.names == ["LlamaForSequenceClassification", "LlamaForSequenceClassification_2"]
    for k, model in enumerate((first, second)):
        assert table.values[:, k].tolist() == pytest.approx(alone(model, plain_rows(tokenizer)), abs=1e-4)


def test_options_of_its_own_are_not_changed(folder):
    options = {"init_kwargs": {"dtype": "bfloat16"}}
    runner = RewardRunner(folder, model_options=options)
    assert runner.models[0].model.dtype == torch.bfloat16
    assert options == {"init_kwargs": {"dtype": "bfloat16"}}


def test_what_is_no_reward_model(tmp_path, tiny_model, tokenizer):
    with pytest.raises(ConfigError, match="LlamaForCausalLM, which has no scalar head"):
        RewardRunner(tiny_model("llama"))
    with pytest.raises(ConfigError, match="no head with one label"):
        RewardRunner(tiny_model("llama", head="value", num_labels=2), processing_classes=tokenizer)
    tiny_model("llama").save_pretrained(tmp_path / "causal")
    with pytest.raises(ConfigError, match=r"is no reward model: its files have no score.weight"):
        RewardRunner(str(tmp_path / "causal"))
    tiny_model("llama", head="value", num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="could not be loaded with one label"):
        RewardRunner(str(tmp_path / "three"))
    with pytest.raises(ConfigError, match="reward_processing_classes: no tokenizer could be loaded"):
        RewardRunner(tiny_model("llama", head="value"))


def test_is_whole_where_zero3_partitions_the_policy(tiny_model, tokenizer, tmp_path, monkeypatch):
    """Ranks call it unequally often; transformers' switch is as before."""

    class Zero3:
        config: dict = {}

        def is_zero3(self):
            return True

    model = tiny_model(head="value")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", Zero3)
    reward = RewardModel(str(tmp_path), tokenizer)
    assert is_deepspeed_zero3_enabled()
    assert reward(PROMPTS, COMPLETIONS) == pytest.approx(alone(model.eval(), plain_rows(tokenizer)), abs=1e-4)
