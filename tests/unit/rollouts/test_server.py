"""ServerBackend against a server of our own: what is asked, what is made of the answers, and what each failure says.

The server has vLLM's routes and really samples; `tests/integration/test_vllm.py` asks a real one the same things.
"""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

from preftune.errors import ConfigError, RolloutError
from preftune.rollouts.server import ServerBackend
from preftune.types import Sampling
from tests.support.vllm_server import FakeVllm, table_logits
from tests.unit.rollouts.helpers import keys, make_prompts, sampling

PROMPTS = make_prompts((1, 5, 9))
ENDS = tuple(range(2, 320, 7))


@pytest.fixture
def server():
    with FakeVllm() as fake:
        yield fake


def backend_of(server: FakeVllm, **options) -> ServerBackend:
    return ServerBackend(server.url, **{"connect_timeout": 5.0, "generation_timeout": 10.0, **options})


def refuse(status: int, body: object):
    return lambda _: (status, body)


# What is asked


def test_a_request_says_everything_that_sampling_says(server):
    wanted = Sampling(
        7, 0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, eos_token_ids=(3, 4), seed=1,
        extra={"min_tokens": 2, "structured_outputs": {"regex": "a+"}},
    )  # fmt: skip
    backend_of(server).generate(PROMPTS, 4, wanted, stream=keys(3))
    requests = sorted(server.completions(), key=lambda r: len(r["prompt"]))
    assert [r["prompt"] for r in requests] == PROMPTS  # each once, for all its samples
    for request in requests:
        assert request | {"seed": 0, "prompt": []} == {
            "model": "tiny", "prompt": [], "n": 4, "max_tokens": 7, "temperature": 0.7, "top_p": 0.9, "top_k": 5,
            "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [3, 4], "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True, "seed": 0, "min_tokens": 2, "structured_outputs": {"regex": "a+"},
        }  # fmt: skip
    seeds = [r["seed"] for r in requests]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**62 for seed in seeds)


def test_samples_depend_on_their_keys_alone(server):
    backend = backend_of(server)
    whole = backend.generate(PROMPTS, 3, sampling(6, eos_token_ids=ENDS), stream=keys(3))
    assert len(whole.completion_ids) == 9 and len(set(map(tuple, whole.completion_ids))) > 3
    alone = backend.generate(PROMPTS[1:2], 3, sampling(6, eos_token_ids=ENDS), stream=keys(3)[1:2])
    assert alone.completion_ids == whole.completion_ids[3:6]
    later = backend.generate(PROMPTS, 3, sampling(6, eos_token_ids=ENDS), stream=keys(3, 1))
    assert later.completion_ids != whole.completion_ids
    seeded = backend.generate(PROMPTS, 3, sampling(6, eos_token_ids=ENDS, seed=1), stream=keys(3))
    assert seeded.completion_ids != whole.completion_ids


def test_completions_end_at_their_first_end_token_and_say_why(server):
    rollouts = backend_of(server).generate(PROMPTS, 8, sampling(5, eos_token_ids=ENDS), stream=keys(3))
    assert {"stop", "length"} == set(rollouts.finish_reasons)
    for ids, reason in zip(rollouts.completion_ids, rollouts.finish_reasons, strict=True):
        assert all(token not in ENDS for token in ids[:-1])
        assert (reason == "stop") == (ids[-1] in ENDS) and (reason == "stop" or len(ids) == 5)


def test_greedy_is_asked_for_once_and_given_to_all_samples(server):
    rollouts = backend_of(server).generate(PROMPTS, 3, sampling(4, temperature=0.0), stream=keys(3))
    assert [r["n"] for r in server.completions()] == [1, 1, 1]
    for place, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for _ in range(4):
            ids.append(int(table_logits(ids).argmax()))
        assert [rollouts.completion_ids[3 * place + g] for g in range(3)] == [ids[len(prompt) :]] * 3


def test_budgets_of_prompts_and_of_the_server(caplog):
    with FakeVllm(max_model_len=11) as server:
        backend = backend_of(server)
        with caplog.at_level(logging.WARNING, "preftune"):
            backend.generate(PROMPTS, 1, sampling(6, budgets=(6, 2, 6)), stream=keys(3))
        assert {len(r["prompt"]): r["max_tokens"] for r in server.completions()} == {1: 6, 5: 2, 9: 2}
        assert "--max-model-len" in caplog.text
        with pytest.raises(RolloutError, match="a prompt of 11 tokens"):
            backend.generate(make_prompts((11,)), 1, sampling(6), stream=keys(1))


def test_no_prompts_ask_for_nothing(server):
    assert backend_of(server).generate([], 3, sampling(4), stream=[]).completion_ids == []
    assert server.completions() == []


@pytest.mark.parametrize(
    "extra", [{"seed": 3}, {"n": 2}, {"stop_token_ids": [1]}, {"temperature": 2.0}, {"min_token": 1}]
)
def test_options_that_cannot_be_followed_are_named(server, extra):
    backend = backend_of(server)
    with pytest.raises(ConfigError, match=next(iter(extra))):
        backend.generate(PROMPTS, 2, sampling(4, extra=extra), stream=keys(3))
    assert server.completions() == []


def test_an_unknown_option_names_the_nearest(server):
    with pytest.raises(ConfigError, match="did you mean 'min_tokens'"):
        backend_of(server).generate(PROMPTS, 2, sampling(4, extra={"min_token": 1}), stream=keys(3))


def test_the_server_may_draw_freely(server):
    backend_of(server).generate(PROMPTS, 2, sampling(4, extra={"seed": None}), stream=keys(3))
    assert [r["seed"] for r in server.completions()] == [None] * 3


# Log-probabilities


@pytest.mark.parametrize(
    ("mode", "options", "is_known"),
    [
        ("processed", {"temperature": 0.7}, True),
        ("processed", {"temperature": 0.7, "top_k": 3}, False),
        ("processed", {"temperature": 0.0}, False),
        ("raw", {}, True),
        ("raw", {"top_k": 3}, True),
        ("raw", {"temperature": 0.7}, False),
        ("raw", {"temperature": 0.0}, True),
    ],
)
def test_log_probs_mean_the_same_whatever_the_server_gives(mode, options, is_known, caplog):
    with FakeVllm(logprobs_mode=mode) as server, caplog.at_level(logging.WARNING, "preftune"):
        backend = backend_of(server)
        rollouts = [backend.generate(PROMPTS, 2, sampling(4, **options), stream=keys(3)) for _ in range(2)][0]
    assert caplog.text.count("are not used") == (not is_known)  # once, however often they are drawn
    if not is_known:
        assert rollouts.logps is None
        return
    assert rollouts.logps is not None
    for row, (ids, logps) in enumerate(zip(rollouts.completion_ids, rollouts.logps, strict=True)):
        whole = [*PROMPTS[row // 2], *ids]
        for place, value in enumerate(logps, start=len(PROMPTS[row // 2])):
            scaled = table_logits(whole[:place]).double() / (options.get("temperature") or 1.0)
            assert value == pytest.approx(float(scaled.log_softmax(-1)[whole[place]]), abs=1e-5)


def test_servers_that_give_logits_are_seen_through(server):
    complete = server.routes["POST /v1/completions"]

    def logits(request):
        status, body = complete(request)
        for choice in body["choices"]:
            choice["logprobs"]["token_logprobs"] = [3.5 for _ in choice["token_ids"]]
        return status, body

    server.routes["POST /v1/completions"] = logits
    assert backend_of(server).generate(PROMPTS, 2, sampling(4), stream=keys(3)).logps is None


@pytest.mark.parametrize("missing", ["all", "one", "infinite"])
def test_missing_log_probs_are_none_for_all(server, missing, caplog):
    backend = backend_of(server)
    complete = server.routes["POST /v1/completions"]

    def answer(request):
        status, body = complete(request)
        if len(request["prompt"]) == 5:
            if missing == "all":
                body["choices"][0]["logprobs"] = None
            else:
                body["choices"][0]["logprobs"]["token_logprobs"][1] = None if missing == "one" else float("-inf")
        return status, body

    server.routes["POST /v1/completions"] = answer
    with caplog.at_level(logging.WARNING, "preftune"):
        assert backend.generate(PROMPTS, 2, sampling(4), stream=keys(3)).logps is None
    assert "left out some log-probabilities" in caplog.text


# Answers that are none


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body.pop("choices"), "choices"),
        (lambda body: body["choices"].pop(), "1 samples where n=2"),
        (lambda body: body["choices"][1].update(index=0), "samples where n=2"),
        (lambda body: body["choices"][0].pop("token_ids"), "token_ids"),
        (lambda body: body["choices"][0].update(token_ids=None), "token_ids=None"),
        (lambda body: body["choices"][0].update(token_ids=[]), r"token_ids=\[\]"),
        (lambda body: body["choices"][0].update(token_ids=["a"] * 4), "token_ids"),
        (lambda body: body["choices"][0].update(token_ids=[1] * 9), "max_tokens=4"),
        (lambda body: body["choices"][0].update(prompt_token_ids=[1, 2]), r"the prompt came back as \[1, 2\]"),
        (lambda body: body["choices"][0].update(finish_reason="abort"), "abort"),
        (lambda body: body["choices"][0]["logprobs"]["token_logprobs"].pop(), "3 log-probabilities of 4 tokens"),
    ],
)
def test_malformed_answers_are_named(server, change, said):
    backend = backend_of(server)
    complete = server.routes["POST /v1/completions"]

    def answer(request):
        status, body = complete(request)
        change(body)
        return status, body

    server.routes["POST /v1/completions"] = answer
    with pytest.raises(RolloutError, match=f"{server.url}/v1/completions answered with what is no completion.*{said}"):
        backend.generate(PROMPTS[:1], 2, sampling(4), stream=keys(1))


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, {"error": {"message": "too many tokens"}}, "status 400: too many tokens"),
        (401, {"error": "Unauthorized"}, "VLLM_API_KEY.*Unauthorized"),
        (404, {"detail": "Not Found"}, "status 404.*wanted is vLLM's own"),
        (500, b"<html>oh no</html>", "status 500.*log.*oh no"),
        (503, b"", "status 503"),
        (200, b"<html>hello</html>", "no JSON.*hello"),
        (200, {"choices": 3}, "no completion"),
    ],
)
def test_a_refused_completion_is_not_sent_again(server, status, body, said):
    backend = backend_of(server)
    server.routes["POST /v1/completions"] = refuse(status, body)
    with pytest.raises(RolloutError, match=said):
        backend.generate(PROMPTS[:1], 2, sampling(4), stream=keys(1))
    assert len(server.completions()) == 1


def test_one_failure_ends_the_round_at_once(server):
    """The other prompts would take 20 s; their connections are cut, and the server notices."""
    backend = backend_of(server)
    complete, release = server.routes["POST /v1/completions"], threading.Event()

    def answer(request):
        if len(request["prompt"]) == 5:
            return 500, {"error": {"message": "engine died"}}
        release.wait(20)
        return complete(request)

    server.routes["POST /v1/completions"] = answer
    started = time.monotonic()
    with pytest.raises(RolloutError, match="engine died"):
        backend.generate(PROMPTS, 2, sampling(4), stream=keys(3))
    while backend.client._http._open and time.monotonic() - started < 5:
        time.sleep(0.01)
    assert time.monotonic() - started < 5 and not backend.client._http._open
    release.set()


def test_a_slow_round_ends_in_time(server):
    backend = backend_of(server, generation_timeout=0.6)
    release = threading.Event()
    server.routes["POST /v1/completions"] = lambda _: (release.wait(20), b"")
    started = time.monotonic()
    with pytest.raises(RolloutError, match="ddp_timeout"):
        backend.generate(PROMPTS, 2, sampling(4), stream=keys(3))
    assert time.monotonic() - started < 5
    release.set()


# Finding the server


def test_the_api_key_goes_along(server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")
    backend_of(server)
    assert {h["Authorization"] for h in server.headers} == {"Bearer of-the-environment"}
    server.headers.clear()
    backend_of(server, api_key="given")
    assert {h["Authorization"] for h in server.headers} == {"Bearer given"}


def test_a_model_is_chosen_by_name(server):
    server.routes["GET /v1/models"] = refuse(200, {"data": [{"id": "a"}, {"id": "b", "max_model_len": 50}]})
    assert backend_of(server).model == "a"
    assert backend_of(server, model="b").model == "b"
    with pytest.raises(RolloutError, match="serves \\['a', 'b'\\]; wanted is 'c'"):
        backend_of(server, model="c")


def test_a_server_that_becomes_ready_is_waited_for(server):
    answers = iter([(503, b""), (500, b""), (200, b"")])
    server.routes["GET /health"] = lambda _: next(answers)
    backend_of(server)
    assert [path for _, path, _ in server.asked].count("/health") == 3


def test_a_server_that_is_never_ready_is_given_up(server, caplog):
    server.routes["GET /health"] = refuse(503, b"loading")
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "preftune"), pytest.raises(RolloutError) as caught:
        backend_of(server, connect_timeout=0.5)
    assert time.monotonic() - started < 3
    for word in (server.url, "503", "vllm serve", "vllm_server_timeout", "vllm_server_base_url"):
        assert word in str(caught.value)
    assert "waiting up to" in caplog.text


def test_nothing_listens():
    with FakeVllm() as gone:
        url = gone.url
    with pytest.raises(RolloutError, match=f"no vLLM server is up at {url}.*connection refused"):
        ServerBackend(url, connect_timeout=0.3)


@pytest.mark.parametrize(
    ("route", "status", "body", "said"),
    [
        ("GET /health", 404, b"404: nothing here", "status 404.*nothing here.*wanted is vLLM's own"),
        ("GET /v1/models", 404, {"detail": "Not Found"}, "status 404.*wanted is vLLM's own"),
        ("GET /v1/models", 401, {"error": "Unauthorized"}, "VLLM_API_KEY"),
        ("GET /v1/models", 200, {"data": []}, "names no model"),
        ("GET /v1/models", 200, [1], "names no model"),
        ("GET /v1/models", 200, b"hello", "no JSON"),
        ("POST /v1/completions", 404, {"detail": "Not Found"}, "wanted is vLLM's own"),
        ("POST /v1/completions", 200, {"choices": [{"text": "a"}]}, "no token ids and log-prob"),
    ],
)
def test_a_server_of_another_kind_is_told_from_the_one_needed(server, route, status, body, said):
    server.routes[route] = refuse(status, body)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=said) as caught:
        backend_of(server)
    assert server.url in str(caught.value)
    assert time.monotonic() - started < 3  # nothing to wait for


def test_without_a_schema_options_pass(server):
    server.routes["GET /openapi.json"] = refuse(404, b"")
    backend_of(server).generate(PROMPTS, 2, sampling(4, extra={"anything": 1}), stream=keys(3))
    assert {r["anything"] for r in server.completions()} == {1}


def test_times_must_be_above_zero():
    with pytest.raises(ConfigError, match="connect_timeout=0"):
        ServerBackend("http://localhost:1", connect_timeout=0)


def test_weights_need_a_way(server):
    with pytest.raises(RolloutError, match="ReloadTransfer"):
        backend_of(server).load_weights([("a", torch.zeros(1))])
