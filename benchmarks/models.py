"""Model folders for the comparison: the one given, or random weights of the same shape (the speed is the same).

`python -m benchmarks.models FOLDER ...` builds one in a process of its own, so that the driver holds no weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL_VARIABLE = "PREFTUNE_BENCH_MODEL"
CACHED = Path("~/.cache/smollm2-135m-instruct").expanduser()
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SMOLLM2 = {"vocabulary": 49152, "hidden": 576, "intermediate": 1536, "layers": 30, "heads": 9, "key_value_heads": 3}
TINY = {"hidden": 64, "intermediate": 128, "layers": 1, "heads": 2, "key_value_heads": 1}
TINY_ONLINE = {"vocabulary": 8000, "hidden": 64, "intermediate": 192, "layers": 2, "heads": 4, "key_value_heads": 2}
TINY_TITLE = "tiny (2 layers of 64, vocabulary 8,000, random)"
EOS_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


def _stand_in_tokenizer() -> Any:
    """A byte-level BPE tokenizer of pronounceable words, with ChatML markers; trained here in a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    words = [f"{a}{v}{b}{w}" for a in consonants for v in vowels for b in consonants for w in vowels]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator((" " + " ".join([w, w, w]) for w in words), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def make(folder: Path, tokenizer_from: Path | None, sizes: dict[str, int]) -> None:
    """Writes a Llama of random bf16 weights and a tokenizer to `folder`."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from) if tokenizer_from else _stand_in_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["key_value_heads"],
        head_dim=sizes["hidden"] // sizes["heads"],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def folder_of(given: str | None, cache: Path) -> tuple[Path, str]:
    """The model's folder and how to call it: the option, the environment variable, the cache, or a stand-in."""
    named = given or os.environ.get(MODEL_VARIABLE)
    if named:
        return Path(named).expanduser().resolve(), Path(named).name
    if (CACHED / "model.safetensors").exists():
        return CACHED, "SmolLM2-135M-Instruct"
    return made("stand-in", cache, None, SMOLLM2), "random weights of SmolLM2-135M's shape"


def made(name: str, cache: Path, tokenizer_from: Path | None, sizes: dict[str, int]) -> Path:
    """A model folder in the cache, built by a process of its own where it is absent."""
    folder = cache / "models" / name
    if not (folder / "model.safetensors").exists():
        command = [sys.executable, "-m", "benchmarks.models", str(folder)]
        command += ["--tokenizer-from", str(tokenizer_from)] if tokenizer_from else []
        for key, value in sizes.items():
            command += ["--" + key.replace("_", "-"), str(value)]
        subprocess.run(command, check=True)
    return folder


def silent_token(tokenizer: dict[str, Any], template: str, taken: Sequence[str]) -> tuple[int, str] | None:
    """A special token (id, text) that a trained model never says: none of `taken`, and not in its chat template.

    Args:
        tokenizer: The content of `tokenizer.json`.
    """
    special = [(t["id"], t["content"]) for t in tokenizer["added_tokens"] if t["special"]]
    free = [(number, text) for number, text in special if text not in taken and text not in template]
    return free[-1] if free else None


def endless(folder: Path, cache: Path) -> Path:
    """The model with an end token that it never says, so that all completions are as long as they may be.

    Where no special token is free (random weights) it keeps its own, one in a vocabulary.
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = folder / "chat_template.jinja"
    text = template.read_text() if template.exists() else str(settings.get("chat_template"))
    taken = [v for k, v in settings.items() if k.endswith("_token") and isinstance(v, str)]
    found = silent_token(tokenizer, text, taken)
    if found is None:
        return folder
    target = cache / "models" / f"endless-{folder.name}"
    target.mkdir(parents=True, exist_ok=True)
    for source in folder.iterdir():
        place = target / source.name
        place.unlink(missing_ok=True)
        if source.name in EOS_FILES:
            content = json.loads(source.read_text())
            eos = {"eos_token": found[1]} if source.name == "tokenizer_config.json" else {"eos_token_id": found[0]}
            place.write_text(json.dumps({**content, **eos}))
        else:
            place.symlink_to(source.resolve())
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer-from", type=Path)
    for key, value in SMOLLM2.items():
        parser.add_argument("--" + key.replace("_", "-"), type=int, default=value)
    args = vars(parser.parse_args())
    make(args.pop("folder"), args.pop("tokenizer_from"), args)


if __name__ == "__main__":
    main()
