"""ServerBackend: rollouts by a vLLM server, in a process, an environment and, if you like, a machine of its own.

Every rank asks for its own part, so no rank waits for another one's turn; weights are pushed by rank zero alone.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist
from torch import Tensor

from preftune.configs.fields import did_you_mean
from preftune.errors import ConfigError, RolloutError
from preftune.rollouts.base import RolloutBackend, Stream, check_request
from preftune.rollouts.http import server_url
from preftune.rollouts.policy import budget_of
from preftune.rollouts.transfer import WeightTransfer
from preftune.rollouts.vllm_client import Drawn, VllmClient
from preftune.types import Rollouts, Sampling

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 128  # requests, each for all samples of a prompt
_NEWS_SECONDS = 60.0
_OURS = {  # what a request says by itself, and the option that it follows
    "model": "the server's model",
    "prompt": "the data",
    "n": "num_generations",
    "best_of": "num_generations",
    "use_beam_search": "num_generations",
    "max_tokens": "max_completion_length",
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_token_ids": "the end tokens of tokenizer and model",
    "ignore_eos": "the end tokens of tokenizer and model",
    "logprobs": "the trainer",
    "return_token_ids": "the trainer",
    "echo": "the trainer",
    "stream": "the trainer",
    "suffix": "the data",
    "truncate_prompt_tokens": "the data",
}


class ServerBackend(RolloutBackend):
    """Asks a vLLM server for completions: one request a prompt, for all its samples, all of them at the same time.

    A sample's random numbers follow from its key by the request's `seed`; given equal logits they do not depend on
    which other prompts are asked for. Log-probabilities mean what those of the local backend mean; where the server
    is set up to give others (see `docs/rollouts.md`) there are none, said once.

    Args:
        base_url: The server's address; the host 0.0.0.0 becomes localhost.
        transfer: How it gets the policy's weights; None: it does not, and a trainer will refuse it.
        model: Which of the server's models; None: its first.
        connect_timeout: Seconds to wait until the server is up.
        generation_timeout: Seconds that one call of `generate`, or one push of weights, may take.
        api_key: The server's `--api-key`; None takes the environment variable VLLM_API_KEY.

    Raises:
        ConfigError: the address is none, or a time is not above 0.
        RolloutError: no vLLM server is up there in time.
    """

    needs_weights = True

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        *,
        transfer: WeightTransfer | None = None,
        model: str | None = None,
        connect_timeout: float = 240.0,
        generation_timeout: float = 1600.0,
        api_key: str | None = None,
    ) -> None:
        if not (connect_timeout > 0 and generation_timeout > 0):
            raise ConfigError(
                f"connect_timeout={connect_timeout} and generation_timeout={generation_timeout}; wanted seconds above 0"
            )
        self.client = VllmClient(server_url(base_url), api_key)
        self._transfer = transfer
        self._connect_timeout = connect_timeout
        self._timeout = generation_timeout
        self._told: set[str] = set()
        self.client.wait_until_up(connect_timeout)
        self.model, self._max_tokens = self._chosen_model(model)
        self._options = self.client.completion_options(min(connect_timeout, 10.0))
        self._logprobs_mode = self.client.logprobs_mode(self.model, generation_timeout)

    def _chosen_model(self, wanted: str | None) -> tuple[str, int | None]:
        models = self.client.models(self._connect_timeout)
        known = {entry["id"]: entry.get("max_model_len") for entry in models}
        name = wanted if wanted is not None else models[0]["id"]
        if name not in known:
            raise RolloutError(f"the vLLM server at {self.client.url} serves {sorted(known)}; wanted is {name!r}")
        return name, known[name]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        *,
        stream: Sequence[Stream],
    ) -> Rollouts:
        check_request(prompts, num_generations, sampling, stream)
        self._check_options(sampling.extra)
        if not prompts:
            return Rollouts([], [], [], logps=[])
        count = num_generations if sampling.temperature > 0 else 1  # vLLM refuses several greedy ones
        budgets = self._budgets(prompts, sampling)
        requests = [
            self._request(list(prompt), count, sampling, budget, key)
            for prompt, budget, key in zip(prompts, budgets, stream, strict=True)
        ]
        groups = self._draw(requests)
        drawn = [one for group in groups for one in group * (num_generations // count)]
        return Rollouts(
            prompts,
            [one.ids for one in drawn],
            [one.reason for one in drawn],
            logps=self._known_logps(drawn, sampling),
        )

    # Requests

    def _check_options(self, extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            if name in _OURS:
                raise ConfigError(f"generation option {name!r} came as an extra, and follows from {_OURS[name]}")
            if name == "seed" and value is not None:
                raise ConfigError(
                    f"generation option seed={value!r} would give every prompt the same random numbers; set the seed "
                    "of the config, or seed=None here to let the server draw freely (faster on a GPU)"
                )
            if self._options is not None and name not in self._options:
                raise ConfigError(
                    f"unknown generation option {name!r}: the vLLM server at {self.client.url} would ignore it"
                    f"{did_you_mean(name, self._options)}"
                )

    def _budgets(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[int]:
        wanted = sampling.budgets or [sampling.max_new_tokens] * len(prompts)
        budgets = [budget_of(len(p), most, self._max_tokens) for p, most in zip(prompts, wanted, strict=True)]
        if any(got < most for got, most in zip(budgets, wanted)):
            self._tell(
                f"the vLLM server takes {self._max_tokens} tokens of prompt and completion (--max-model-len): some "
                f"completions get less than {max(wanted)} tokens"
            )
        return budgets

    def _request(self, prompt: list[int], count: int, sampling: Sampling, budget: int, key: Stream) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "n": count,
            "max_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.eos_token_ids),
            "ignore_eos": True,  # the model's own end token counts only where it is one of ours
            "logprobs": 0,  # of the token drawn, and of no other
            "return_token_ids": True,
            "seed": _seed(sampling.seed, key),
            **sampling.extra,
        }

    def _draw(self, requests: Sequence[Mapping[str, Any]]) -> list[list[Drawn]]:
        started = time.monotonic()
        pool = ThreadPoolExecutor(min(len(requests), _MAX_AT_ONCE))
        calls = [pool.submit(self._complete, request, started + self._timeout) for request in requests]
        left = set(calls)
        try:
            while left:
                done, left = wait(left, timeout=_NEWS_SECONDS, return_when=FIRST_EXCEPTION)
                for call in done:
                    call.result()
                if left:
                    passed = time.monotonic() - started
                    logger.info("%d prompts wait for %s since %.0f s", len(left), self.client.url, passed)
            return [call.result() for call in calls]
        except BaseException:
            for call in calls:
                call.cancel()
            self.client.hang_up()  # so that the server does not work on
            raise
        finally:
            pool.shutdown(wait=False)

    def _complete(self, request: Mapping[str, Any], deadline: float) -> list[Drawn]:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RolloutError(
                f"the vLLM server at {self.client.url} did not draw a round in {self._timeout:.0f} s (ddp_timeout sets "
                "it); raise that, or lower max_completion_length or generation_batch_size"
            )
        return self.client.complete(request, left)

    # Log-probabilities

    def _known_logps(self, drawn: Sequence[Drawn], sampling: Sampling) -> list[list[float]] | None:
        """Those under softmax(logits / temperature), as every backend gives them, or None."""
        is_raw_enough = self._logprobs_mode == "raw" and sampling.temperature in (0.0, 1.0)
        if not is_raw_enough and not (self._logprobs_mode == "processed" and sampling.is_plain):
            self._tell(
                f"the vLLM server's log-probabilities ({self._logprobs_mode}) are not those of softmax(logits / "
                "temperature) with these sampling options, so that they are not used. They would be with "
                "--logprobs-mode processed_logprobs where temperature is the only option set, or with raw_logprobs at "
                "temperature 1"
            )
            return None
        given = [one.logps for one in drawn]
        known = [logps for logps in given if logps is not None and all(map(math.isfinite, logps))]
        if len(known) < len(given):
            self._tell("the vLLM server left out some log-probabilities; those of the round are not used")
            return None
        return known

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)

    # Weights

    def load_weights(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Pushes the weights from rank zero; all ranks call it, and all raise where it failed.

        Raises:
            RolloutError: the server did not take them, or there is no transfer.
        """
        if self._transfer is None:
            raise RolloutError(
                "this ServerBackend has no transfer, so its server would go on drawing with the weights it was started "
                "with; pass transfer=ReloadTransfer(folder) or transfer=NcclTransfer()"
            )
        weights = iter(named_parameters)
        failure: Exception | None = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                self._transfer.push(self.client, weights, self._timeout)
            except Exception as error:  # noqa: BLE001 - raised below, when every rank knows
                failure = error
        for _ in weights:  # gathering is a collective: it goes on where this rank has no use for it
            pass
        told = [None if failure is None else str(failure)]
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=0)
        if failure is not None:
            raise failure
        if told[0] is not None:
            raise RolloutError(f"rank 0 could not push the weights: {told[0]}")

    def close(self) -> None:
        self.client.hang_up()
        if self._transfer is not None:
            self._transfer.close()


def _seed(seed: int, key: Stream) -> int:
    """Of a prompt's samples, which vLLM numbers upwards from it; below 2**62, so that they fit its 64 bits."""
    digest = hashlib.blake2b(repr((seed, *map(int, key))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
