"""`preftune demo`: a tiny chat model taught a task by SFT, then aligned by DPO and by GRPO, in minutes.

Nothing is downloaded. Every figure printed was measured in the run; the model starts as a mixture of right and wrong
habits (reverse the word, or copy or shuffle it) and preferences teach it which one is wanted.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from pathlib import Path
from typing import Any

LETTERS = "abcdefghij"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Any:
    """One token a letter, four special tokens and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def build_model(tokenizer: Any, seed: int = 0) -> Any:
    """A random Llama with 108k parameters; the global random state is left as it was."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _chat(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def make_data(rows: int, held_out: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Demonstrations of mixed habits, preference pairs, and held-out pairs over words that training never sees."""
    from datasets import Dataset

    rng = random.Random(seed)
    words = ["".join(rng.choices(LETTERS, k=4)) for _ in range(4 * (rows + held_out))]
    words = [w for w in dict.fromkeys(words) if w != w[::-1]]
    unseen, seen = words[:held_out], words[held_out : held_out + rows]

    def shuffled(word: str) -> str:
        return "".join(rng.sample(word, 4))

    def habit(word: str) -> str:
        return rng.choices([word[::-1], word, shuffled(word)], [0.4, 0.4, 0.2])[0]

    def pair(word: str) -> dict[str, Any]:
        wrong = word if rng.random() < 0.7 else shuffled(word)
        if wrong == word[::-1]:
            wrong = word
        return {
            "prompt": _chat("user", word),
            "chosen": _chat("assistant", word[::-1]),
            "rejected": _chat("assistant", wrong),
        }

    demonstrations = [{"prompt": _chat("user", w), "completion": _chat("assistant", habit(w))} for w in seen * 5]
    return (
        Dataset.from_list(demonstrations),
        Dataset.from_list([pair(w) for w in seen]),
        Dataset.from_list([pair(w) for w in unseen]),
    )


def exact_match(model: Any, tokenizer: Any, pairs: Any) -> Any:
    """Share of held-out prompts whose greedy answer is the chosen one, with its interval."""
    import torch

    from preftune.trainers.pairs import bootstrap_share

    prompts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in pairs["prompt"]]
    ids = torch.tensor(prompts)  # all prompts have the same length
    model.eval()
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    answers = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    wanted = [chosen[-1]["content"] for chosen in pairs["chosen"]]
    return bootstrap_share([a == w for a, w in zip(answers, wanted, strict=True)])


def imitate(tokenizer: Any, demonstrations: Any, out: Path, steps: int = 450, seed: int = 0) -> Any:
    """The first act: a model with the mixed habits of the demonstrations."""
    from preftune import RichProgressCallback, SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=build_model(tokenizer, seed),
        args=SFTConfig(str(out), max_steps=steps, learning_rate=2e-3, max_length=32, **_common(seed)),
        train_dataset=demonstrations,
        processing_class=tokenizer,
        callbacks=[RichProgressCallback()],
    )
    trainer.train()
    return trainer.model


def reversed_word(completions: list[Any], word: list[str], **_: Any) -> list[float]:
    """1 for the word reversed, else 0."""
    return [float(answer[0]["content"] == given[::-1]) for answer, given in zip(completions, word, strict=True)]


def reinforce(
    model: Any, tokenizer: Any, words: list[str], out: Path, steps: int = 60, seed: int = 0, algorithm: str = "grpo"
) -> Any:
    """The third act: the model learns from the reward of its own answers, with plain settings; returns the trainer."""
    from datasets import Dataset

    from preftune import GRPOConfig, GRPOTrainer, RichProgressCallback, RLOOConfig, RLOOTrainer

    config, trainer_class = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[algorithm]
    options = _common(seed) | {"per_device_train_batch_size": 256, "warmup_steps": 5, "logging_steps": 5}
    trainer = trainer_class(
        model=model,
        reward_funcs=reversed_word,
        args=config(
            str(out),
            max_steps=steps,
            learning_rate=3e-4,
            num_generations=8,
            max_completion_length=6,
            beta=0.0,
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": _chat("user", word), "word": word} for word in words]),
        processing_class=tokenizer,
        callbacks=[RichProgressCallback()],
    )
    trainer.train()
    return trainer


def _common(seed: int) -> dict[str, Any]:
    return {
        "report_to": "none", "bf16": False, "save_strategy": "no", "seed": seed, "logging_steps": 25,
        "per_device_train_batch_size": 64, "per_device_eval_batch_size": 64,
        "lr_scheduler_type": "linear", "warmup_steps": 20,
    }  # fmt: skip


def run(
    output_dir: str | Path = "demo-output",
    sft_steps: int = 450,
    dpo_steps: int = 150,
    grpo_steps: int = 60,
    seed: int = 0,
) -> dict[str, Any]:
    """All acts, from random weights to aligned models; returns the figures that it prints."""
    from preftune import DPOConfig, DPOTrainer, RichProgressCallback

    start, out = time.perf_counter(), Path(output_dir)
    tokenizer = build_tokenizer()
    demonstrations, pairs, held_out = make_data(rows=6000, held_out=300, seed=seed)
    print("Act 1: SFT on demonstrations of mixed habits (40 % reversed, 40 % copied, 20 % shuffled)", flush=True)
    taught = imitate(tokenizer, demonstrations, out / "sft", sft_steps, seed)
    by_reward = copy.deepcopy(taught)
    print("Act 2: DPO on pairs (reversed is preferred), the reference following the policy", flush=True)
    dpo = DPOTrainer(
        model=taught,
        args=DPOConfig(
            str(out / "dpo"),
            max_steps=dpo_steps,
            learning_rate=3e-4,
            beta=0.1,
            sync_ref_model=True,
            ref_model_sync_steps=32,
            ref_model_mixup_alpha=0.6,
            max_length=32,
            **_common(seed),
        ),  # fmt: skip
        train_dataset=pairs,
        processing_class=tokenizer,
        callbacks=[RichProgressCallback()],
    )
    before, match_before = dpo.score_pairs(held_out), exact_match(dpo.model, tokenizer, held_out)
    dpo.train()
    after, match_after = dpo.score_pairs(held_out), exact_match(dpo.model, tokenizer, held_out)
    dpo.save_model(str(out / "model"))
    print("Act 3: GRPO from the model of act 1; the reward is 1 for the word reversed, else 0", flush=True)
    words = [prompt[-1]["content"] for prompt in pairs["prompt"]]
    grpo = reinforce(by_reward, tokenizer, words, out / "grpo", grpo_steps, seed)
    grpo.save_model(str(out / "model-grpo"))
    rewards = [entry["reward"] for entry in grpo.state.log_history if "reward" in entry]
    match_grpo = exact_match(grpo.model, tokenizer, held_out)
    rows = [
        ("pair accuracy, summed", before.summed, after.summed),
        ("pair accuracy, per token", before.per_token, after.per_token),
        ("greedy exact match", match_before, match_after),
        ("greedy exact match, GRPO", match_before, match_grpo),
    ]
    _print_table(rows, len(held_out))
    print(f"reward of GRPO's answers while it learned: {', '.join(f'{reward:.2f}' for reward in rewards)}")
    print(f"models: {out / 'model'}, {out / 'model-grpo'}   {time.perf_counter() - start:.0f} s", flush=True)
    return {name: {"before": b, "after": a} for name, b, a in rows} | {"rewards": rewards}


def main(words: list[str]) -> int:
    """The command: `preftune demo [--output_dir FOLDER] [--seed N]`."""
    parser = argparse.ArgumentParser(prog="preftune demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_dir", default="demo-output", help="where models and logs go (demo-output)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and order (0)")
    options = parser.parse_args(words)
    import torch

    torch.set_num_threads(1)  # a model of 108k parameters gains nothing from more, and loses much on a busy machine
    run(options.output_dir, seed=options.seed)
    return 0


def _print_table(rows: list[tuple[str, Any, Any]], n: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{n} held-out words, share and 95 % bootstrap interval")
    for column in ("", "after SFT", "aligned"):
        table.add_column(column)
    for name, before, after in rows:
        table.add_row(name, *(f"{s.value:.3f} [{s.low:.3f}, {s.high:.3f}]" for s in (before, after)))
    Console(file=sys.stdout).print(table)
