"""Training runs that mean the same for one process and for several: the global batch is fixed, ranks share it.

Each returns plain numbers; weights go to a file that the test reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from safetensors.torch import load_file

from preftune import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SDFTConfig,
    SDFTTrainer,
    SDPOConfig,
    SDPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from preftune.callbacks.metric_names import is_clock
from preftune.models.distributed import full_state_dict, local_shard, unwrap
from tests.support.models import tiny_model
from tests.support.rows import preference_rows
from tests.support.runs import digest, options
from tests.support.tokenizers import make_tokenizer

BATCH = 4  # rows over all processes
SGD = {"optim": "sgd", "learning_rate": 0.5}
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 2}
BEMA = {"bema_ref_model": True, "bema_update_freq": 1, "ref_model_update_freq": 2}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
SHARES: dict[str, int] = {}  # parameters that this rank holds, after `sync` under a backend that shards


def logs_of(trainer: Any) -> list[dict[str, float]]:
    """Everything logged but times."""
    return [numbers_of(entry) for entry in trainer.state.log_history]


def numbers_of(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not is_clock(k) and k != "total_flos"}


def save_weights(trainer: Any, folder: Path) -> None:
    """Policy and reference of every rank, and what was saved as model and as BEMA, for a comparison by the test."""
    state = {f"policy.{k}": v.clone() for k, v in full_state_dict(unwrap(trainer.model), {}).items()}
    if trainer.ref_model is not None:
        state |= {f"reference.{k}": v.clone() for k, v in full_state_dict(unwrap(trainer.ref_model), {}).items()}
    for part in ("model", "bema"):
        for path in (folder / ("" if part == "model" else part)).glob("*.safetensors"):
            state |= {f"{part}.{k}": v for k, v in load_file(path).items()}
    torch.save(state, folder / f"weights-{trainer.args.process_index}.pt")


def policy(seed: int = 0) -> Any:
    """The tiny model, or the folder that holds it where models are to be loaded by name."""
    folder = os.environ.get("PREFTUNE_TEST_MODELS")
    return str(Path(folder, f"seed{seed}")) if folder else tiny_model(seed=seed)


def save_models(folder: Path) -> dict[str, str]:
    """Writes the models that `policy` gives; the environment that makes it give their folders."""
    for seed in (0, 1):
        tiny_model(seed=seed).save_pretrained(folder / f"seed{seed}")
    tiny_model(head="value").save_pretrained(folder / "reward")
    return {"PREFTUNE_TEST_MODELS": str(folder)}


def text_rows(count: int) -> list[dict[str, str]]:
    rows = preference_rows()["text"]
    return [{k: f"{v}{'.' * (i // len(rows))}" for k, v in rows[i % len(rows)].items()} for i in range(count)]


def dpo(folder: Path, processes: int, *, rows: Any = None, peft: dict | None = None, **changes: Any) -> DPOTrainer:
    """A trainer whose step holds `BATCH` rows (times the accumulation steps) over all processes."""
    extra = {k: changes.pop(k) for k in ("eval_dataset", "ref_model") if k in changes}
    changes.setdefault("per_device_train_batch_size", BATCH // processes)
    rows = text_rows(16) if rows is None else rows
    return DPOTrainer(
        model=policy(),
        args=DPOConfig(**options(folder, **changes)),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        processing_class=make_tokenizer("plain"),
        peft_config=LoraConfig(**peft) if peft else None,
        **extra,
    )


def sft(folder: Path, processes: int, rows: list[dict], **changes: Any) -> SFTTrainer:
    eval_rows = changes.pop("eval_dataset", None)
    changes.setdefault("per_device_train_batch_size", BATCH // processes)
    return SFTTrainer(
        model=policy(),
        args=SFTConfig(**options(folder, **changes)),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=eval_rows,
        processing_class=make_tokenizer("plain"),
    )


def reward(folder: Path, processes: int, rows: list[dict], **changes: Any) -> RewardTrainer:
    models = os.environ.get("PREFTUNE_TEST_MODELS")
    eval_rows = changes.pop("eval_dataset", None)
    changes.setdefault("per_device_train_batch_size", BATCH // processes)
    return RewardTrainer(
        str(Path(models, "reward")) if models else tiny_model(head="value"),
        args=RewardConfig(**options(folder, **changes)),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=eval_rows,
        processing_class=make_tokenizer("plain"),
    )


def trained(trainer: Any, folder: Path) -> dict[str, Any]:
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    save_weights(trainer, folder)
    form = trainer.reference.form if trainer.reference is not None else None
    return {"logs": logs_of(trainer), "layout": trainer.layout, "reference": form}


def ids(number: int, length: int) -> list[int]:
    """Token ids that differ from row to row."""
    return [7 + (number * 31 + i * 7) % 290 for i in range(length)]


def id_pairs(lengths: list[int]) -> list[dict[str, list[int]]]:
    return [
        {"prompt_ids": ids(n, length // 2 + 1), "chosen_ids": ids(n + 50, length), "rejected_ids": ids(n + 90, length)}
        for n, length in enumerate(lengths)
    ]


def id_texts(lengths: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": ids(n, length), "labels": ids(n, length)} for n, length in enumerate(lengths)]


# --- equal to one process ---------------------------------------------------------------------------------------------


def sync(folder: Path, processes: int) -> dict[str, Any]:
    """Shuffled, over the end of an epoch, with a reference that moves."""
    trainer = dpo(folder, processes, **SYNC, **SGD, max_steps=6)
    result = trained(trainer, folder)
    if trainer.is_sharded:
        held = {"policy": trainer.model, "reference": unwrap(trainer.ref_model)}
        SHARES.update({name: sum(local_shard(p).numel() for p in m.parameters()) for name, m in held.items()})
    return result


def adamw(folder: Path, processes: int) -> dict[str, Any]:
    return trained(dpo(folder, processes, **SYNC, adam_epsilon=1e-3), folder)


def bema(folder: Path, processes: int) -> dict[str, Any]:
    """The average is kept in shards and saved whole."""
    return trained(dpo(folder, processes, **BEMA, **SGD), folder)


def lora_bema(folder: Path, processes: int) -> dict[str, Any]:
    return trained(dpo(folder, processes, peft=LORA, **BEMA, **SGD), folder)


def aot(folder: Path, processes: int) -> dict[str, Any]:
    """Rows are sorted over all ranks."""
    changes = {"loss_type": ["aot", "sft"], "ref_model": policy(seed=1), "gradient_accumulation_steps": 2}
    return trained(dpo(folder, processes, **changes, **SGD), folder)


def checkpointed(folder: Path, processes: int) -> dict[str, Any]:
    """R152: an adapter and activation checkpointing; layers run a second time in the backward pass."""
    return trained(dpo(folder, processes, peft=LORA, activation_checkpointing=True, max_steps=2, **SGD), folder)


def accumulated(folder: Path, processes: int) -> dict[str, Any]:
    """Micro-batches of unlike number a rank, one log for two steps."""
    budget = {"gradient_accumulation_steps": 2, "max_tokens_per_micro_batch": 60, "logging_steps": 2}
    return trained(dpo(folder, processes, **budget, **SGD), folder)


def tokens(folder: Path, processes: int) -> dict[str, Any]:
    """SFT: the mean is over the tokens of all ranks, whose rows have very different lengths."""
    rows = id_texts([3, 4, 40, 50, 5, 3, 60, 30, 4, 4, 50, 44, 6, 7, 33, 61])
    changes = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2, "shuffle_dataset": False}
    return trained(sft(folder, processes, rows, **changes, **SGD), folder)


def ragged(folder: Path, processes: int) -> dict[str, Any]:
    """The rows do not fill the last step of an epoch: 7 = 4 + 3, and 5 = 4 + 1, where one rank has no row."""
    result = {}
    for count in (7, 5):
        for loss in ("sigmoid", "aot"):
            name = f"{loss}{count}"
            changes = {"loss_type": [loss], "ref_model": policy(seed=1)}
            trainer = dpo(folder / name, processes, rows=text_rows(count), **changes, **SGD)
            result[name] = trained(trainer, folder / name)
    return result


def streaming(folder: Path, processes: int) -> dict[str, Any]:
    """Rows from two files of unlike length, as many shards as processes; 13 rows, so the last step holds one."""
    result = {}
    for shards in (1, 2):
        name = f"shards{shards}"
        trainer = dpo(folder / name, processes, rows=stream(text_rows(13), shards), max_steps=6, **SGD)
        result[name] = trained(trainer, folder / name)
    return result


def stream(rows: list[dict], shards: int = 1) -> IterableDataset:
    """Rows that can only be read in order, from files of unlike length."""
    parts = [rows] if shards == 1 else [rows[:9], rows[9:]]
    made = IterableDataset.from_generator(_read, gen_kwargs={"parts": parts})
    assert made.num_shards == shards
    return made


def _read(parts: list[list[dict]]) -> Any:
    for part in parts:
        yield from part


def rewards(folder: Path, processes: int) -> dict[str, Any]:
    """W18: a scalar head; extremes over ranks and steps, steps and an eval set that one rank has no last row of."""
    rows = [row | {"margin": 0.1 * n} for n, row in enumerate(text_rows(7))]
    changes = {
        "center_rewards_coefficient": 0.01, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "per_device_eval_batch_size": 2, "eval_dataset": Dataset.from_list(rows[:5]), "optim": "sgd",
        "learning_rate": 0.05,
    }  # fmt: skip
    trainer = reward(folder, processes, rows, **changes)
    result = trained(trainer, folder)
    table = trainer.score_pairs(Dataset.from_list(rows))
    return result | {"table": {name: values.tolist() for name, values in vars(table).items()}}


def kto(folder: Path, processes: int) -> dict[str, Any]:
    """The baseline is a mean over all ranks; 13 rows, of which the last step holds one; a stream, and an eval set."""
    rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": n % 3 > 0} for n, r in enumerate(text_rows(13))]
    forms: dict[str, dict[str, Any]] = {
        "set": {}, "accumulated": {"gradient_accumulation_steps": 2}, "stream": {},
        "budget": {"max_tokens_per_micro_batch": 60, "train_sampling_strategy": "sequential"},
    }  # fmt: skip
    result = {}
    for name, changes in forms.items():
        trainer = KTOTrainer(
            model=policy(),
            ref_model=policy(seed=1),
            args=KTOConfig(
                **options(
                    folder / name, per_device_train_batch_size=BATCH // processes, per_device_eval_batch_size=2,
                    max_steps=5, eval_strategy="steps", eval_steps=2, **changes, **SGD,
                )
            ),
            train_dataset=stream(rows) if name == "stream" else Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:5]),
            processing_class=make_tokenizer("plain"),
        )  # fmt: skip
        result[name] = trained(trainer, folder / name)
        result[f"{name}_rewards"] = trainer.score_rows(Dataset.from_list(rows[:5])).rewards.tolist()
    return result


def online(folder: Path, processes: int) -> dict[str, Any]:
    """Rounds that serve several steps; rewards compared over ranks; a group that two ranks share; evaluation."""
    forms: dict[str, dict[str, Any]] = {
        "grpo": {"num_iterations": 2, "steps_per_generation": 2, "scale_rewards": "batch", **SYNC},
        "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "gradient_accumulation_steps": 2},
        "rloo": {"normalize_advantages": True, "gradient_accumulation_steps": 2},
    }
    return {
        name: trained(rounds(folder / name, processes, name, **changes), folder / name)
        for name, changes in forms.items()
    }


def online_lora(folder: Path, processes: int) -> dict[str, Any]:
    """An adapter, a reward model that is loaded by name, and completions drawn in evaluation before there is a step."""
    judge = Path(os.environ.get("PREFTUNE_TEST_MODELS", folder), "reward")
    if not judge.exists():
        tiny_model(head="value").save_pretrained(judge)
    trainer = rounds(folder, processes, "grpo", peft=LORA, judge=str(judge), num_iterations=2)
    before = numbers_of(trainer.evaluate())
    is_whole = all(p.numel() for p in trainer.rewards.models[0].model.parameters())
    return trained(trainer, folder) | {"before": before, "reward model is whole": is_whole}


def rounds(
    folder: Path, processes: int, name: str, *, peft: dict | None = None, judge: str | None = None, **changes: Any
) -> Any:
    """An online trainer whose step holds `BATCH` completions over all processes, two for each prompt."""
    config, trainer_class = (RLOOConfig, RLOOTrainer) if name == "rloo" else (GRPOConfig, GRPOTrainer)
    common = {
        "per_device_train_batch_size": BATCH // processes, "num_generations": 2, "beta": 0.1,
        "max_completion_length": 5, "per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2, **SGD,
    }  # fmt: skip
    return trainer_class(
        model=policy(),
        reward_funcs=[_letters, judge] if judge else _letters,
        reward_processing_classes=[None, make_tokenizer("plain")] if judge else None,
        args=config(**options(folder, **common | changes)),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in text_rows(9)]),
        eval_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in text_rows(3)]),
        processing_class=make_tokenizer("plain"),
        peft_config=LoraConfig(**peft) if peft else None,
    )


def distilled(folder: Path, processes: int) -> dict[str, Any]:
    """Self-distillation: an averaged teacher, rounds that serve several steps, attempts shown to their siblings."""
    forms: dict[str, dict[str, Any]] = {
        "sdft": {"num_iterations": 2, "steps_per_generation": 2, "teacher_model_kind": "ema", "distillation_topk": 20},
        "sdpo": {"distillation_weight": 0.5, "beta": 0.1, "success_reward_threshold": 0.5},
    }
    result = {}
    for name, changes in forms.items():
        config, trainer_class = (SDPOConfig, SDPOTrainer) if name == "sdpo" else (SDFTConfig, SDFTTrainer)
        rows = [{"prompt": row["prompt"], "privileged_context": row["chosen"]} for row in text_rows(9)]
        trainer = trainer_class(
            model=policy(),
            **({"reward_funcs": _letters} if name == "sdpo" else {}),
            args=config(
                **options(
                    folder / name, per_device_train_batch_size=BATCH // processes, num_generations=2,
                    max_completion_length=5, per_device_eval_batch_size=2, num_generations_eval=2,
                    eval_strategy="steps", eval_steps=2, **changes, **SGD,
                )
            ),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:3]),
            processing_class=make_tokenizer("plain"),
        )  # fmt: skip
        result[name] = trained(trainer, folder / name)
    return result


def _letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluation(folder: Path, processes: int) -> dict[str, Any]:
    """Eval sets that do not divide; batches of 2 rows, the same for any number of processes."""
    rows = text_rows(7)
    sets: Any = {str(n): Dataset.from_list(rows[:n]) for n in (7, 5, 1)}
    sets["stream"] = Dataset.from_list(rows[:5]).to_iterable_dataset()
    changes = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2, **SGD}
    trainer = dpo(folder, processes, eval_dataset=sets, **changes)
    before = vars(trainer.score_pairs(sets["7"]))
    result = trained(trainer, folder)
    again = numbers_of(trainer.evaluate({"again": Dataset.from_list(rows[:3])}))
    after = vars(trainer.score_pairs(sets["7"]))
    tables = {when: {k: v.tolist() for k, v in table.items()} for when, table in (("before", before), ("after", after))}
    return result | {"again": again, "tables": tables}


def judged(folder: Path, processes: int) -> dict[str, Any]:
    """Evaluation of a model that is not trained at all, with losses that look at the rows beside."""
    rows = text_rows(7)
    changes = {"loss_type": ["sigmoid", "sft", "aot"], "per_device_eval_batch_size": 2}
    trainer = dpo(folder, processes, ref_model=policy(seed=1), eval_dataset=Dataset.from_list(rows), **changes)
    return {"eval": numbers_of(trainer.evaluate())}


def stored(folder: Path, processes: int) -> dict[str, Any]:
    """Reference log-probabilities scored beforehand, each row by one rank."""
    rows = text_rows(13)
    changes = {"precompute_ref_log_probs": processes > 1, "eval_strategy": "steps", "eval_steps": 2}
    sets = {"a": Dataset.from_list(rows[:3]), "b": Dataset.from_list(rows[:6])}
    trainer = dpo(folder, processes, rows=rows[:12], eval_dataset=sets, per_device_eval_batch_size=2, **changes, **SGD)
    return trained(trainer, folder)


# --- going on ---------------------------------------------------------------------------------------------------------


def resume(folder: Path, processes: int) -> dict[str, Any]:
    """Seven steps at once, and as many over a checkpoint: in the first epoch, and in the second."""
    result = {}
    forms: dict[str, dict[str, Any]] = {
        "sync": {**SYNC, "save_steps": 2},
        "lora_bema": {**BEMA, "save_steps": 2, "peft": LORA | {"lora_dropout": 0.2}},
        "ragged": {**SYNC, "save_steps": 3, "rows": text_rows(7)},
        "bfloat16": {**SYNC, "save_steps": 3, "bf16": True, "logging_steps": 1},
        "stream": {**SYNC, "save_steps": 3, "rows": stream(text_rows(19)), "gradient_accumulation_steps": 2},
    }
    for name, changes in forms.items():
        common = {"max_steps": 7, "save_strategy": "steps", "logging_steps": 3} | changes
        straight = dpo(folder / f"{name}-a", processes, **common)
        straight.train()
        digests, logs = [digest(straight)], [logs_of(straight)]
        for step in (changes["save_steps"], 6):
            torch.manual_seed(99 + step)
            resumed = dpo(folder / f"{name}-{step}", processes, **common)
            resumed.train(resume_from_checkpoint=str(folder / f"{name}-a" / f"checkpoint-{step}"))
            digests.append(digest(resumed))
            logs.append(logs_of(resumed))
        result[name] = {"digests": digests, "logs": logs}
    return result


def online_resume(folder: Path, processes: int) -> dict[str, Any]:
    """Five steps at once, and as many over a checkpoint in the middle of a round, and between rounds."""
    result = {}
    forms: dict[str, dict[str, Any]] = {
        "full": {}, "lora": {"peft": LORA}, "bfloat16": {"bf16": True, "rollout_precision": "bfloat16"},
    }  # fmt: skip
    for name, changes in forms.items():
        # torch cannot load the state of an optimizer that has none (SGD) into shards
        common = {
            "num_iterations": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": 1,
            "optim": "adamw_torch", "learning_rate": 1e-2, **SYNC, **changes,
        }  # fmt: skip
        straight = rounds(folder / f"{name}-a", processes, "grpo", **common)
        straight.train()
        digests, logs = [digest(straight)], [logs_of(straight)]
        for step in (1, 2):
            torch.manual_seed(99 + step)
            resumed = rounds(folder / f"{name}-{step}", processes, "grpo", **common)
            resumed.train(resume_from_checkpoint=str(folder / f"{name}-a" / f"checkpoint-{step}"))
            digests.append(digest(resumed))
            logs.append(logs_of(resumed))
        result[name] = {"digests": digests, "logs": logs}
    return result


# --- unequal work -----------------------------------------------------------------------------------------------------


def unequal(folder: Path, processes: int) -> dict[str, Any]:
    """R154, R155: rank 0 has rows of 5 tokens and rank 1 of 50; logs and evaluates every step, splits by tokens."""
    lengths = ([5] * (BATCH // 2) + [50] * (BATCH // 2)) * 3
    common = {
        "train_sampling_strategy": "sequential", "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1,
        "per_device_eval_batch_size": 2, "max_tokens_per_micro_batch": 60, **SGD,
    }  # fmt: skip
    pairs, texts = id_pairs(lengths), id_texts(lengths)
    preference = dpo(folder / "dpo", processes, rows=pairs, eval_dataset=Dataset.from_list(pairs[:5]), **common)
    supervised = sft(
        folder / "sft", processes, texts, eval_dataset=Dataset.from_list(texts[:5]), shuffle_dataset=False, **common
    )
    return {"dpo": trained(preference, folder / "dpo"), "sft": trained(supervised, folder / "sft")}


SCENARIOS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        sync,
        adamw,
        bema,
        lora_bema,
        aot,
        checkpointed,
        accumulated,
        tokens,
        ragged,
        streaming,
        unequal,
        rewards,
        kto,
        online,
        online_lora,
        online_resume,
        distilled,
        evaluation,
        judged,
        stored,
        resume,
    )
}
