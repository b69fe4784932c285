"""Options of trainers that sample completions while they train: how many, how, by which backend, in which batches.

Fields keep what was given; numbers that follow from them are properties, so a config can be rebuilt with other values.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import GenerationConfig

from preftune.configs.base import BaseConfig, deprecated
from preftune.configs.fields import did_you_mean, option
from preftune.configs.offline import padding_multiple
from preftune.errors import ConfigError

ROLLOUT_BACKENDS = ("local", "continuous", "server", "vllm")
ROLLOUT_PRECISIONS = ("model", "bfloat16")
VLLM_MODES = ("server", "colocate")

# generation_kwargs that have an option of their own: the log-probabilities must know of them too.
_OWN_OPTION = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
}
# And those that would take away the samples of a group: the one value that changes nothing, and what to set instead.
_REFUSED = {
    "num_return_sequences": (1, "Set num_generations, the completions of each prompt."),
    "num_beams": (1, "Completions are sampled; beams of one prompt are no samples."),
    "do_sample": (True, "Greedy completions of one prompt are all the same, and teach nothing."),
}

# Options that nothing here reads: where what they say belongs, or why there is nothing to say.
_WITHOUT_EFFECT = {
    "cache_implementation": "every backend has a cache of its own kind.",
    "dataloader_num_workers": "the rows of a round are read when it begins.",
    "train_sampling_strategy": "shuffle_dataset says whether prompts come in a random order or in their own.",
    "vllm_model_impl": "it is the server's option --model-impl.",
    "vllm_enable_sleep_mode": "a server shares no memory with the trainer.",
    "vllm_gpu_memory_utilization": "it is the server's option --gpu-memory-utilization.",
    "vllm_max_model_length": "it is the server's option --max-model-len.",
    "vllm_tensor_parallel_size": "it is the server's option --tensor-parallel-size.",
    "vllm_group_port": "the server and the trainer find one another without a port.",
}
# Options that one backend alone reads, beside vllm_server_*.
_READ_BY = {"rollout_precision": "local", "transformers_continuous_batching_config": "continuous"}


@dataclass(repr=False)
class RolloutConfig(BaseConfig):
    """Sampling, generation backend and the batches of a generation round."""

    _VALID_DICT_FIELDS = [
        *BaseConfig._VALID_DICT_FIELDS,
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]
    _OWN_DICT_FIELDS: ClassVar[tuple[str, ...]] = (
        *BaseConfig._OWN_DICT_FIELDS,
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    )

    remove_unused_columns: bool | None = option(
        False, "Drop the columns that are neither prompt nor image before training; reward functions then miss them."
    )
    shuffle_dataset: bool = option(True, "Take the training prompts in a random order, another one each epoch.")
    num_generations: int = option(8, "Completions sampled for each prompt: the group that is compared.", low=2)
    num_generations_eval: int | None = option(
        None, "The same in evaluation, where 1 is allowed. Unset: num_generations.", low=1
    )
    num_iterations: int = option(1, "Passes of training over the completions of a generation round.", low=1)
    generation_batch_size: int | None = option(
        None,
        "Completions of a generation round over all processes: a multiple of num_generations and of the micro-batch "
        "(per_device_train_batch_size x processes). Unset: follows from steps_per_generation.",
        low=1,
    )
    steps_per_generation: int | None = option(
        None, "Micro-batches of a generation round. Unset: gradient_accumulation_steps, one round a step.", low=1
    )
    max_completion_length: int = option(512, "Most tokens of a completion.", low=1)
    mask_truncated_completions: bool = option(
        False, "Leave completions that ran out of max_completion_length out of the loss; their rewards still count."
    )
    log_completions: bool = option(False, "Show a table of completions, rewards and advantages at each log.")
    log_multimodal: bool = option(
        True, "Show the images that stand in the messages of prompts beside them in the tables sent to trackers."
    )
    num_completions_to_print: int | None = option(None, "Rows of the table on the console. Unset: all; 0: none.")
    log_unique_prompts: bool = option(False, "One row a prompt in the tables sent to trackers.")
    pad_to_multiple_of: int | str | None = option(
        "auto",
        "Accepted for scripts that come from TRL and without effect: rows are padded to their longest, or not at all.",
        low=1,
    )
    temperature: float = option(
        1.0, "Divides the logits, in sampling and in all log-probabilities; lower is less diverse.", above=0
    )
    top_p: float = option(1.0, "Sample from the most probable tokens that make up this share. 1: all.", above=0, high=1)
    top_k: int = option(0, "Sample from this many most probable tokens. 0: all.", low=0)
    min_p: float | None = option(
        None, "Sample from tokens at least this probable, relative to the most probable one.", low=0, high=1
    )
    repetition_penalty: float = option(1.0, "Above 1: tokens that have occurred become less probable.", above=0)
    generation_kwargs: dict[str, Any] | str | None = option(
        None,
        "Other options of generation, applied last (transformers' GenerationConfig, vLLM's SamplingParams). Sampling "
        "options in here replace those above.",
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Values passed on to the chat template, for instance enable_thinking."
    )
    cache_implementation: str | None = option(
        None, "Without effect (it warns): every backend has a cache of its own kind."
    )
    rollout_backend: str = option(
        "local",
        "What generates: local (in process, the prompt computed once), continuous (transformers' continuous "
        "batching) or server (a vLLM server); vllm (in process) is refused. use_vllm and its kin choose one too.",
        choices=ROLLOUT_BACKENDS,
    )
    rollout_precision: str = option(
        "model",
        "Numbers of the local backend: those of the model, or bfloat16 in a copy (the weights that are trained stay).",
        choices=ROLLOUT_PRECISIONS,
    )
    ds3_gather_for_generation: bool = option(
        True,
        "A policy that ZeRO-3 or FSDP2 shards generates in process from a whole copy, gathered on each process for the "
        "time of the rollouts. False is refused there: use a vLLM server.",
    )
    use_transformers_continuous_batching: bool = option(False, "The same as rollout_backend=continuous.")
    transformers_continuous_batching_config: dict[str, Any] | str | None = option(
        None, "Options of transformers' ContinuousBatchingConfig; max_memory_percent is 0.5 unless set."
    )
    use_transformers_paged: bool = option(False, "Deprecated: set use_transformers_continuous_batching instead.")
    use_vllm: bool = option(False, "Generate with vLLM; vllm_mode says where it runs.")
    vllm_mode: str = option(
        "colocate",
        "Where vLLM runs with use_vllm: in its own process (server); in this one (colocate) is refused.",
        choices=VLLM_MODES,
    )
    vllm_model_impl: str = option(
        "vllm", "Without effect (it warns): the server's option --model-impl.", choices=("vllm", "transformers")
    )
    vllm_enable_sleep_mode: bool = option(
        False, "Without effect (it warns): a server shares no memory with the trainer."
    )
    vllm_structured_outputs_regex: str | None = option(None, "vLLM: completions match this regular expression.")
    vllm_server_base_url: str | None = option(
        None, "vLLM server: its address, such as http://localhost:8000. Replaces host and port."
    )
    vllm_server_host: str = option("0.0.0.0", "vLLM server: its host.")
    vllm_server_port: int = option(8000, "vLLM server: its port.", low=1, high=65535)
    vllm_server_timeout: float = option(240.0, "vLLM server: seconds to wait until it is up.", above=0)
    vllm_group_port: int = option(
        51216,
        "Without effect (it warns): the server and the trainer find one another without a port.",
        low=1,
        high=65535,
    )
    vllm_weights_dir: str | None = option(
        None,
        "vLLM server: a folder that it sees under the same path; weights are written there and loaded by it. Unset: "
        "they are sent by NCCL where there is CUDA, else the folder is OUTPUT_DIR/vllm_weights.",
    )
    vllm_gpu_memory_utilization: float = option(
        0.3, "Without effect (it warns): the server's option --gpu-memory-utilization.", above=0, high=1
    )
    vllm_max_model_length: int | None = option(
        None, "Without effect (it warns): the server's option --max-model-len.", low=1
    )
    vllm_tensor_parallel_size: int = option(
        1, "Without effect (it warns): the server's option --tensor-parallel-size.", low=1
    )

    def _normalise(self) -> None:
        super()._normalise()
        if isinstance(self.pad_to_multiple_of, str):
            self.pad_to_multiple_of = padding_multiple(self.pad_to_multiple_of)
        if self.use_transformers_paged is True:
            deprecated("use_transformers_paged", "use_transformers_continuous_batching takes its place")
            self.use_transformers_continuous_batching, self.use_transformers_paged = True, False
        if isinstance(self.generation_kwargs, dict):
            given = dict(self.generation_kwargs)
            for key in [key for key in given if key in _OWN_OPTION]:
                setattr(self, _OWN_OPTION[key], given.pop(key))
            self.generation_kwargs = given or None

    def _check(self) -> None:
        super()._check()
        if self.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True changes the batch size while training, but the groups of a generation round "
                "depend on it. Set it to False; max_tokens_per_micro_batch bounds memory without changing the result."
            )
        given = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        for key, (neutral, instead) in _REFUSED.items():
            if given.get(key, neutral) != neutral:
                raise ConfigError(f"generation_kwargs has {key}={given[key]!r}. {instead}")
        if self.resolved_rollout_backend != "server":
            known = vars(GenerationConfig())
            for key in set(given) - set(known):
                raise ConfigError(
                    f"generation_kwargs has {key!r}, which is no field of transformers' GenerationConfig"
                    f"{did_you_mean(key, known) or '.'}"
                )
        if len(self._backends_asked) > 1:
            raise ConfigError(
                f"{' and '.join(self._backends_asked.values())} name different rollout backends. Keep one of them."
            )
        self._check_vllm()

    def _check_vllm(self) -> None:
        """vLLM runs as a server; what would be asked of one in this process is refused, or said to be elsewhere."""
        backend = self.resolved_rollout_backend
        if backend == "vllm":
            raise ConfigError(
                f"{self._backends_asked['vllm']} runs vLLM in this process, and it cannot be installed beside preftune "
                "(vLLM 0.32 wants transformers below 5.20, preftune 5.24). Give it an environment of its own, start it "
                "with `vllm serve MODEL`, and set vllm_mode='server' or rollout_backend='server'; see docs/rollouts.md."
            )
        if self.vllm_structured_outputs_regex is not None and backend != "server":
            raise ConfigError(
                f"vllm_structured_outputs_regex={self.vllm_structured_outputs_regex!r} needs a vLLM server, and "
                f"rollout_backend is {backend!r}. Set rollout_backend='server', or leave the expression out."
            )
        for f in dataclasses.fields(self):
            if f.name in _WITHOUT_EFFECT and vars(self)[f.name] != f.default:
                warnings.warn(f"{f.name}={vars(self)[f.name]!r} has no effect: {_WITHOUT_EFFECT[f.name]}", stacklevel=2)
            reader = "server" if f.name.startswith("vllm_server_") else _READ_BY.get(f.name)
            if reader not in (None, backend) and vars(self)[f.name] != f.default:
                warnings.warn(
                    f"{f.name}={vars(self)[f.name]!r} has no effect with rollout_backend={backend!r}. Leave it out, or "
                    f"set rollout_backend={reader!r}, which reads it.",
                    stacklevel=2,
                )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_round()  # only now is the number of processes known
        if self.eval_strategy != "no":
            self.check_eval_batch()

    def _check_round(self) -> None:
        """A round is made of whole micro-batches and of whole groups."""
        per_step, size = self._micro_batch, self.resolved_generation_batch_size
        spelt = f"per_device_train_batch_size={self.per_device_train_batch_size} x {self.world_size} process(es)"
        works = math.lcm(per_step, self.num_generations)
        if self.generation_batch_size is not None:
            if size % per_step != 0:
                raise ConfigError(
                    f"generation_batch_size={size} is no multiple of a micro-batch, {spelt} = {per_step} completions. "
                    f"With num_generations={self.num_generations}, multiples of {works} work."
                )
            if self.steps_per_generation not in (None, size // per_step):
                raise ConfigError(
                    f"generation_batch_size={size} makes {size // per_step} micro-batches ({spelt}), but "
                    f"steps_per_generation={self.steps_per_generation}. Set one of the two."
                )
        if size % self.num_generations != 0:
            remedy = f"generation_batch_size to a multiple of {works}"
            if self.generation_batch_size is None and self.steps_per_generation is None:
                remedy = f"gradient_accumulation_steps to a multiple of {works // per_step} (or {remedy})"
            raise ConfigError(
                f"A generation round has {size} completions ({spelt}, {self.resolved_steps_per_generation} micro-"
                f"batches), which do not make whole groups of num_generations={self.num_generations}. Set "
                f"{remedy}, or change num_generations."
            )

    def check_eval_batch(self) -> None:
        """Refuse evaluation batches that cut a group in two; done here where evaluation is planned.

        Raises:
            ConfigError: the evaluation batch over all processes does not make whole groups.
        """
        size, group = self.per_device_eval_batch_size * self.world_size, self.resolved_num_generations_eval
        if size % group != 0:
            raise ConfigError(
                f"per_device_eval_batch_size={self.per_device_eval_batch_size} x {self.world_size} process(es) = "
                f"{size} completions do not make whole groups of {group} (num_generations_eval, else num_generations). "
                "Change one of them; num_generations_eval=1 always fits."
            )

    @property
    def _backends_asked(self) -> dict[str, str]:
        """The backends other than `local` that are asked for, each with the option that does."""
        asked = {}
        if self.rollout_backend != "local":
            asked[self.rollout_backend] = f"rollout_backend={self.rollout_backend!r}"
        if self.use_vllm:
            asked["server" if self.vllm_mode == "server" else "vllm"] = f"use_vllm=True, vllm_mode={self.vllm_mode!r}"
        if self.use_transformers_continuous_batching:
            asked["continuous"] = "use_transformers_continuous_batching=True"
        return asked

    @property
    def resolved_rollout_backend(self) -> str:
        """The backend that generates, whichever option chose it."""
        return next(iter(self._backends_asked), "local")

    @property
    def _micro_batch(self) -> int:
        """Completions of a micro-batch over all processes."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def resolved_steps_per_generation(self) -> int:
        """Micro-batches of a generation round."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self._micro_batch
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def resolved_generation_batch_size(self) -> int:
        """Completions of a generation round over all processes."""
        return self.generation_batch_size or self._micro_batch * self.resolved_steps_per_generation

    @property
    def round_prompts(self) -> int:
        """Distinct prompts of a generation round over all processes."""
        return self.resolved_generation_batch_size // self.num_generations

    @property
    def steps_per_round(self) -> int:
        """Micro-batches that learn from a generation round, all its iterations together."""
        return self.resolved_steps_per_generation * self.num_iterations

    @property
    def resolved_num_generations_eval(self) -> int:
        """Completions of each prompt in evaluation."""
        return self.num_generations_eval or self.num_generations
