"""A server with the routes of vLLM's that rollouts use, in a thread: it really samples, from any function of ids.

What it answers can be replaced route by route, and it remembers what it was asked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

VOCABULARY = 320
_OPTIONS = (
    "model", "prompt", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "ignore_eos", "logprobs", "return_token_ids", "logit_bias", "min_tokens",
    "structured_outputs",
)  # fmt: skip
Route = Callable[[Any], tuple[int, Any]]


def table_logits(ids: list[int]) -> Tensor:
    """Logits `[V]` that follow from the last token alone."""
    return 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(ids[-1]))


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up on purpose."""


class FakeVllm:
    """`with FakeVllm() as server:` serves at `server.url`.

    Args:
        logits: Of the next token, `[V]`, given all ids.
        model: Takes the place of `logits`, and has the weights that are reloaded.
        logprobs_mode: "processed" or "raw".

    Attributes:
        asked: `(method, path, content)` of every request, in order.
        routes: `"METHOD /path"` -> function of the content that gives status and JSON (or bytes as they are).
    """

    def __init__(
        self,
        logits: Callable[[list[int]], Tensor] = table_logits,
        *,
        model: Any = None,
        logprobs_mode: str = "processed",
        max_model_len: int = 200,
    ) -> None:
        self._logits = logits
        self._model = model
        self._mode = logprobs_mode
        self.max_model_len = max_model_len
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.routes: dict[str, Route] = {
            "GET /health": lambda _: (200, b""),
            "GET /v1/models": self._models,
            "GET /openapi.json": self._schema,
            "GET /get_world_size": lambda _: (200, {"world_size": 2}),
            "POST /v1/completions": self._complete,
            "POST /collective_rpc": self._rpc,
            "POST /reset_prefix_cache": lambda _: (200, {"success": True}),
        }
        self._lock = threading.Lock()

    def __enter__(self) -> FakeVllm:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                content = json.loads(self.rfile.read(length)) if length else None
                with fake._lock:
                    fake.asked.append((self.command, self.path, content))
                    fake.headers.append(dict(self.headers))
                route = fake.routes.get(f"{self.command} {self.path}")
                status, body = route(content) if route else (404, {"detail": "Not Found"})
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _serve

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def completions(self) -> list[dict[str, Any]]:
        """The requests for completions so far, without those that a client makes to find out about log-probs."""
        sent = [content for _, path, content in self.asked if path == "/v1/completions"]
        return [content for content in sent if "logit_bias" not in content]

    def _models(self, _: Any) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": self.max_model_len}]}

    def _schema(self, _: Any) -> tuple[int, Any]:
        return 200, {"components": {"schemas": {"CompletionRequest": {"properties": dict.fromkeys(_OPTIONS, {})}}}}

    def _rpc(self, content: Any) -> tuple[int, Any]:
        assert content["method"] == "reload_weights"
        with self._lock:
            weights = load_file(Path(content["kwargs"]["weights_path"]) / "model.safetensors")
            self._model.load_state_dict(weights)
        return 200, {"results": [None]}

    def _complete(self, request: Any) -> tuple[int, Any]:
        if request["temperature"] == 0 and request.get("n", 1) > 1:
            return 400, {"error": {"message": "n must be 1 when using greedy sampling", "code": 400}}
        if len(request["prompt"]) + request["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": f"longer than {self.max_model_len}", "code": 400}}
        with self._lock:
            choices = [self._choice(request, index) for index in range(request.get("n", 1))]
        return 200, {"object": "text_completion", "choices": choices}

    @torch.no_grad()
    def _choice(self, request: Any, index: int) -> dict[str, Any]:
        generator = torch.Generator()
        if request.get("seed") is None:
            generator.seed()
        else:
            generator.manual_seed(request["seed"] + index)
        ids, values, reason = list(request["prompt"]), [], "length"
        for _ in range(request["max_tokens"]):
            raw = self._model(torch.tensor([ids])).logits[0, -1] if self._model is not None else self._logits(ids)
            scores = raw.clone()
            for token, bias in request.get("logit_bias", {}).items():
                scores[int(token)] += bias
            scores = scores / (request["temperature"] or 1.0)
            if request.get("top_k"):
                scores[scores < scores.topk(request["top_k"]).values[-1]] = -torch.inf
            probabilities = scores.softmax(-1)
            greedy = request["temperature"] == 0
            token = scores.argmax() if greedy else torch.multinomial(probabilities, 1, generator=generator)[0]
            ids.append(int(token))
            known = scores if self._mode == "processed" else raw
            values.append(float(known.log_softmax(-1)[token]))
            if ids[-1] in request.get("stop_token_ids", []):
                reason = "stop"
                break
        drawn = ids[len(request["prompt"]) :]
        return {
            "index": index,
            "text": "",
            "finish_reason": reason,
            "token_ids": drawn,
            "prompt_token_ids": request["prompt"],
            "logprobs": {"token_logprobs": values, "tokens": [""] * len(drawn), "text_offset": [0] * len(drawn)},
        }
