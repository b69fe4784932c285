"""VllmClient: the routes of vLLM's OpenAI-compatible server that rollouts need, with errors that say what to do.

Only GETs are repeated, and only until a deadline; a POST that failed is never sent again by itself.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from preftune.errors import RolloutError
from preftune.rollouts.http import Answer, HttpClient
from preftune.types import FinishReason

logger = logging.getLogger(__name__)

LogprobsMode = Literal["raw", "processed", "none"]
KIND = (
    "wanted is vLLM's own OpenAI-compatible server: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 "
    "--logprobs-mode processed_logprobs (see docs/rollouts.md)"
)
_REMEDIES = {
    401: "set the environment variable VLLM_API_KEY to the server's --api-key",
    403: "set the environment variable VLLM_API_KEY to the server's --api-key",
    404: "a server of another kind, one that was started without VLLM_SERVER_DEV_MODE=1, or a wrong address",
    500: "its own log has the reason",
    503: "its engine does not run; its own log has the reason",
}
_COMPLETIONS = "/v1/completions"
_BROKEN = (OSError, http.client.HTTPException)
_LONGEST_PAUSE = 2.0
_LONGEST_LOOK = 10.0
_ZERO = 1e-3  # of a log-probability, in nats


class Drawn(NamedTuple):
    """One completion as the server gave it; no log-probs where it gave none."""

    ids: list[int]
    reason: FinishReason
    logps: list[float] | None


class VllmClient:
    """Talks to one vLLM server.

    Args:
        url: Its address, as `preftune.rollouts.http.server_url` gives it.
        api_key: Its `--api-key`; None takes the environment variable VLLM_API_KEY, if that is set.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        self._http = HttpClient(url, api_key if api_key is not None else os.environ.get("VLLM_API_KEY"))

    def hang_up(self) -> None:
        """Ends all requests that are under way; the server then stops working on them."""
        self._http.hang_up()

    def wait_until_up(self, timeout: float) -> None:
        """Returns once the server says that it is well.

        Raises:
            RolloutError: it does not within `timeout` seconds, or is a server of another kind.
        """
        answer = self._patient_get("/health", timeout)
        if answer.status != 200:
            raise self._refused("GET", "/health", answer)

    def get(self, path: str, timeout: float) -> Any:
        """The JSON at `path`; asked for again where the server is busy or not there, until the time is up.

        Raises:
            RolloutError: there was none.
        """
        answer = self._patient_get(path, timeout)
        if answer.status != 200:
            raise self._refused("GET", path, answer)
        return self._decoded(path, answer)

    def post(self, path: str, content: Any, timeout: float) -> Any:
        """The JSON that the server answers (None where it answers nothing). Sent once.

        Raises:
            RolloutError: no connection, no answer in time, a status other than 200, or no JSON.
        """
        try:
            answer = self._http.request("POST", path, content, timeout=timeout)
        except _BROKEN as error:
            raise RolloutError(
                f"POST {self.url}{path}: {_spelt(error)}. It was not sent again; see the server's log. A server that "
                "is slow, not stuck, needs more time or less to do: ddp_timeout limits a round, max_completion_length "
                "a completion"
            ) from error
        if answer.status != 200:
            raise self._refused("POST", path, answer)
        return self._decoded(path, answer) if answer.body else None

    def models(self, timeout: float) -> list[dict[str, Any]]:
        """What the server serves: `id` and, of a model that is no adapter, `max_model_len`."""
        listed = self.get("/v1/models", timeout)
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not models or not all(isinstance(m, dict) and "id" in m for m in models):
            raise RolloutError(f"GET {self.url}/v1/models names no model: {_short(listed)}; {KIND}")
        return models

    def completion_options(self, timeout: float) -> frozenset[str] | None:
        """The names that a request for completions may have; None where the server does not tell."""
        try:
            schemas = self.get("/openapi.json", timeout)["components"]["schemas"]
            return frozenset(schemas["CompletionRequest"]["properties"])
        except (RolloutError, KeyError, TypeError):
            return None

    def complete(self, request: Mapping[str, Any], timeout: float) -> list[Drawn]:
        """The `request["n"]` samples of one prompt, which asks for token ids and log-probabilities.

        Raises:
            RolloutError: as `post` does, or the answer is not one to this request.
        """
        answer = self.post(_COMPLETIONS, request, timeout)
        try:
            return _samples(answer, request)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RolloutError(
                f"POST {self.url}{_COMPLETIONS} answered with what is no completion of the prompt: {error!r}. The "
                "server is of another version, or something between changes its answers"
            ) from error

    def logprobs_mode(self, model: str, timeout: float) -> LogprobsMode:
        """Whether log-probabilities are the model's own (raw) or those tokens are drawn with (processed): by trial.

        The server does not tell. A token that a bias makes certain has log-probability 0 where the bias counts; two are
        tried, since without it at most one of them can be certain.

        Raises:
            RolloutError: the server cannot give token ids, or no log-probabilities at all.
        """
        values = [self._biased(model, token, timeout) for token in (0, 1)]
        if max(values) > _ZERO:
            return "none"  # --logprobs-mode raw_logits or processed_logits
        return "processed" if min(values) > -_ZERO else "raw"

    def _biased(self, model: str, token: int, timeout: float) -> float:
        request = {
            "model": model,
            "prompt": [0],
            "max_tokens": 1,
            "temperature": 1.0,
            "logit_bias": {str(token): 100.0},
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self.post(_COMPLETIONS, request, timeout)
        try:
            choice = answer["choices"][0]
            if choice["token_ids"] != [token]:
                raise ValueError(choice["token_ids"])
            return float(choice["logprobs"]["token_logprobs"][0])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise RolloutError(
                f"POST {self.url}{_COMPLETIONS} gave no token ids and log-probabilities but {_short(answer)}; "
                f"{KIND}, of version 0.11 or later"
            ) from error

    def _patient_get(self, path: str, timeout: float) -> Answer:
        deadline = time.monotonic() + timeout
        pause, last = 0.1, "nothing was tried"
        is_told = False
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._http.request("GET", path, timeout=min(left, _LONGEST_LOOK))
                if answer.status < 500:
                    return answer
                last = f"it answers with status {answer.status}"
            except _BROKEN as error:
                last = _spelt(error)
            if not is_told:
                is_told = True
                logger.warning("waiting up to %.0f s for a vLLM server at %s: %s", timeout, self.url, last)
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise RolloutError(
            f"no vLLM server is up at {self.url} after {timeout:.0f} s of asking for {path}: {last}. Start one, set "
            f"vllm_server_base_url (or host and port) to where it is, or wait longer with vllm_server_timeout; {KIND}"
        )

    def _refused(self, method: str, path: str, answer: Answer) -> RolloutError:
        said = _message(answer.body)
        remedy = _REMEDIES.get(answer.status)
        hint = f" ({remedy})" if remedy else ""
        kind = f"; {KIND}" if answer.status in (404, 405) else ""
        return RolloutError(f"{method} {self.url}{path} gave status {answer.status}{hint}: {said}{kind}")

    def _decoded(self, path: str, answer: Answer) -> Any:
        try:
            return json.loads(answer.body)
        except ValueError as error:
            raise RolloutError(f"{self.url}{path} answered with no JSON: {_short(answer.body)}; {KIND}") from error


def _samples(answer: Any, request: Mapping[str, Any]) -> list[Drawn]:
    """The samples of an answer, in order.

    Raises:
        KeyError, TypeError, ValueError, IndexError: it is not one for this request.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(request["n"])):
        raise ValueError(f"{len(choices)} samples where n={request['n']}")
    return [_sample(choice, request) for choice in choices]


def _sample(choice: Mapping[str, Any], request: Mapping[str, Any]) -> Drawn:
    ids, reason = choice["token_ids"], choice["finish_reason"]
    if choice["prompt_token_ids"] != request["prompt"]:
        raise ValueError(f"the prompt came back as {choice['prompt_token_ids']}")
    if reason not in ("stop", "length"):
        raise ValueError(f"it ended for the reason {reason!r}")
    if not ids or len(ids) > request["max_tokens"] or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"token_ids={ids} with max_tokens={request['max_tokens']}")
    values = (choice["logprobs"] or {}).get("token_logprobs")
    if values is None or None in values:
        return Drawn(ids, reason, None)
    if len(values) != len(ids):
        raise ValueError(f"{len(values)} log-probabilities of {len(ids)} tokens")
    return Drawn(ids, reason, [float(value) for value in values])


def _spelt(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    return f"{error}" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"


def _message(body: bytes) -> str:
    """What an error of vLLM says; of another server, the beginning of its page."""
    try:
        decoded = json.loads(body)
    except ValueError:
        return _short(body)
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    return str(error.get("message", _short(error))) if isinstance(error, dict) else _short(error)


def _short(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
