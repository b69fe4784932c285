"""The runner: what functions are given, what they may return, and what follows when they misbehave.

Rewards are known by construction, and that functions run together is proved by coroutines that wait for each other.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import random
import threading

import numpy as np
import pytest
import torch

from preftune.errors import ConfigError, RewardError
from preftune.rewards.base import RewardRunner

PROMPTS = ["one", "one", "two", "two"]
COMPLETIONS = ["a", "bb", "ccc", "dddd"]
IDS = [[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]]


def run(reward_funcs, *, columns=None, trainer_state=None, seed=None, **options):
    runner = RewardRunner(reward_funcs, **options)
    try:
        return runner.run(
            prompts=PROMPTS,
            completions=COMPLETIONS,
            completion_ids=IDS,
            columns=columns,
            trainer_state=trainer_state,
            seed=seed,
        )
    finally:
        runner.close()


def lengths(completions, **_):
    return [float(len(c)) for c in completions]


async def async_lengths(completions, **_):
    return [float(len(c)) for c in completions]


class Lengths:
    def __call__(self, completions, **_):
        return [float(len(c)) for c in completions]


class AsyncLengths:
    async def __call__(self, completions, **_):
        return [float(len(c)) for c in completions]


# --- kinds and names --------------------------------------------------------------------------------------------------

KINDS = {
    "function": (lengths, "lengths"),
    "partial": (functools.partial(functools.partial(lengths, k=1), j=2), "lengths"),
    "lambda": (lambda completions: [float(len(c)) for c in completions], "<lambda>"),
    "object": (Lengths(), "Lengths"),
    "async function": (async_lengths, "async_lengths"),
    "async object": (AsyncLengths(), "AsyncLengths"),
    "partial of async": (functools.partial(async_lengths, k=1), "async_lengths"),
    "lambda around async": (lambda completions: async_lengths(completions), "<lambda>"),
    "partial of async object": (functools.partial(AsyncLengths(), k=1), "AsyncLengths"),
}


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, timeout):
    function, name = KINDS[kind]
    table = run(function, timeout=timeout)
    assert table.values.tolist() == [[1.0], [2.0], [3.0], [4.0]]
    assert table.names == [name]
    assert table.seconds[name] >= 0
    assert table.metrics == {f"rewards/{name}/seconds_per_sample": table.seconds[name] / 4}


def test_equal_names_are_told_apart_with_one_warning(caplog):
    table = run([lambda completions: [1] * 4, lambda completions: [2] * 4, lengths, lengths])
    assert table.names == ["<lambda>", "<lambda>_2", "lengths", "lengths_2"]
    assert table.values[0].tolist() == [1, 2, 1, 1]
    assert sum("share a name" in r.message for r in caplog.records) == 1


def test_a_name_that_was_given_is_not_taken_away():
    assert run([lengths, lengths, lengths], names=["f", "f", "f_2"]).names == ["f", "f_3", "f_2"]


def test_built_in_and_import_path_by_name():
    table = run(["think_format_reward", "tests.unit.rewards.in_processes:process_id"])
    assert table.names == ["think_format_reward", "process_id"]
    assert table.values[:, 0].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("reward_funcs", "message"),
    [
        ([], "empty"),
        ([lengths, 3], r"reward_funcs\[1\] is a int"),
        (None, r"reward_funcs\[0\] is a NoneType"),
        (Lengths, "Pass an instance"),
        ("acuracy_reward", "Did you mean 'accuracy_reward'"),
    ],
)
def test_no_reward(reward_funcs, message):
    with pytest.raises(ConfigError, match=message):
        RewardRunner(reward_funcs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "reward_timeout=0"),
        ({"timeout": math.nan}, "reward_timeout=nan"),
        ({"on_error": "skip"}, "'raise' or 'none'"),
        ({"processes": -1}, "processes=-1"),
        ({"names": ["a", "b"]}, "2 names are given for 1"),
        ({"processing_classes": [None, None]}, "must match"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        RewardRunner(lengths, **options)


# --- what a function is given -----------------------------------------------------------------------------------------


def test_everything_by_keyword():
    seen = {}

    def reward(**kwargs):
        seen.update(kwargs)
        return [0.0] * 4

    state = object()
    columns = {"gold": [1, 2, 3, 4], "prompt": PROMPTS, "completion": COMPLETIONS, "completion_ids": IDS}
    run(reward, columns=columns, trainer_state=state)
    assert set(seen) == {"prompts", "completions", "completion_ids", "gold", "trainer_state", "log_extra", "log_metric"}
    assert (seen["prompts"], seen["completions"], seen["completion_ids"]) == (PROMPTS, COMPLETIONS, IDS)
    assert seen["gold"] == [1, 2, 3, 4]
    assert seen["trainer_state"] is state


def test_only_what_the_signature_takes():
    assert run(lambda gold: gold, columns={"gold": [1, 2, 3, 4], "other": "abcd"}).values[:, 0].tolist() == [1, 2, 3, 4]
    assert run(lambda completions, /, gold=None: gold, columns={"gold": [1, 2, 3, 4]}).values[2, 0] == 3


def test_what_a_partial_has_fixed_is_not_given_again():
    fixed = functools.partial(lambda gold, **_: gold, gold=[9, 9, 9, 9])
    assert run(fixed, columns={"gold": [1, 2, 3, 4]}).values[:, 0].tolist() == [9, 9, 9, 9]


def test_a_missing_column_is_named_before_anything_runs():
    runner = RewardRunner([lengths, lambda completions, solution: completions])
    with pytest.raises(ConfigError, match=r"needs 'solution'.*Columns: 'answer'"):
        runner.check_columns(["prompt", "answer"])
    runner.check_columns(["solution"])


@pytest.mark.parametrize("column", ["prompts", "completions", "trainer_state", "log_extra", "log_metric"])
def test_columns_named_like_arguments(column):
    with pytest.raises(ConfigError, match=rf"{column!r}.*rename_column\('{column}', 'my_{column}'\)"):
        RewardRunner(lengths).check_columns(["gold", column])
    with pytest.raises(ConfigError, match=column):
        run(lengths, columns={column: [1, 2, 3, 4]})


def test_a_column_of_another_length():
    with pytest.raises(RewardError, match="'gold' has 3 values for 4 completions"):
        run(lengths, columns={"gold": [1, 2, 3]})


def test_a_function_that_empties_its_lists_harms_nobody():
    def greedy(completions, **_):
        completions.clear()
        return [0.0] * 4

    assert run([greedy, lengths]).values[:, 1].tolist() == [1, 2, 3, 4]
    assert len(COMPLETIONS) == 4


def test_a_function_that_rewrites_what_is_in_them_harms_nobody():
    """Messages and token ids are handed over as copies: the next function and the table see what was said."""
    seen = []

    def rewrites(prompts, completions, completion_ids):
        prompts[0][0]["content"] = completions[0][0]["content"] = "mine"
        completion_ids[0].clear()
        return [0.0]

    def reads(prompts, completions, completion_ids):
        seen.append((prompts, completions, completion_ids))
        return [0.0]

    prompts, completions = [[{"role": "user", "content": "a"}]], [[{"role": "assistant", "content": "b"}]]
    given = {"prompts": prompts, "completions": completions, "completion_ids": [[1, 2]]}
    RewardRunner([rewrites, reads]).run(**given)
    assert seen == [tuple(given.values())]
    assert (prompts[0][0]["content"], completions[0][0]["content"]) == ("a", "b")


def test_no_rows():
    table = RewardRunner([lengths, lengths]).run(prompts=[], completions=[], completion_ids=[])
    assert table.values.shape == (0, 2)
    assert table.unrewarded == []


# --- what a function returns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0, 2, -1],
        (1.0, 0.0, 2.0, -1.0),
        torch.tensor([1, 0, 2, -1]),
        torch.tensor([1.0, 0.0, 2.0, -1.0], requires_grad=True),
        np.array([1, 0, 2, -1], dtype=np.int8),
        np.array([1, 0, 2, -1], dtype=object),
        [torch.tensor(1.0), np.float32(0), np.int64(2), -1],
        [True, np.bool_(False), 2, -1],
    ],
    ids=["list", "tuple", "tensor", "with gradient", "array", "objects", "scalars", "booleans"],
)
def test_accepted(returned):
    assert run(lambda **_: returned).values[:, 0].tolist() == [1, 0, 2, -1]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 values; wanted 4"),
        ([1.0] * 3, "returned 3 values"),
        ([1.0] * 8, "returned 8 values"),
        (1.0, "returned float 1.0; wanted 4 numbers"),
        (None, "returned NoneType None"),
        ("abcd", "returned str 'abcd'"),
        ({0: 1.0}, "returned dict"),
        (torch.ones(4, 1), r"Tensor of shape \(4, 1\).*shape \(4,\)"),
        (np.array(1.0), r"ndarray of shape \(\)"),
        ([1.0, "1", 1.0, 1.0], "returned str '1' for row 1"),
        ([1.0, [2.0], 1.0, 1.0], r"returned list \[2.0\] for row 1"),
        ([1.0, 1.0, math.nan, 1.0], "returned nan for row 2; wanted a finite number. Return None"),
        ([1.0, 1.0, 1.0, math.inf], "returned inf for row 3"),
        ([-math.inf, 1.0, 1.0, 1.0], "returned -inf for row 0"),
        ([1.0, 1.0, 1.0, 10**400], "returned inf for row 3"),
        ([1.0, 1.0, 1e39, 1.0], r"returned 1e\+39 for row 2"),
        (torch.tensor([1.0, math.nan, 1.0, 1.0]), "returned nan for row 1"),
    ],
)
def test_refused(returned, message):
    def my_reward(**_):
        return returned

    with pytest.raises(RewardError, match=message) as caught:
        run([lengths, my_reward])
    assert "'my_reward'" in str(caught.value)


def test_none_means_does_not_apply(caplog):
    table = run([lambda **_: [1.0, None, None, 0.0], lambda **_: [None, None, 2.0, 0.0]], names=["f", "g"])
    assert np.array_equal(table.values, [[1, np.nan], [np.nan, np.nan], [np.nan, 2], [0, 0]], equal_nan=True)
    assert table.unrewarded == [1]
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "1 of 4 rows" in warning and "completions='bb'" in warning


def test_the_warning_of_unrewarded_rows_is_short_and_comes_once(caplog):
    runner = RewardRunner(lambda **_: [None])
    for _ in range(2):
        runner.run(prompts=["x" * 10_000], completions=["y"], completion_ids=[[1]], columns={"gold": ["z" * 10_000]})
    (record,) = caplog.records
    assert len(record.getMessage()) < 1000


# --- errors and limits ------------------------------------------------------------------------------------------------


def broken(**_):
    raise KeyError("gold")


async def async_broken(**_):
    raise KeyError("gold")


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("function", [broken, async_broken, lambda **_: async_broken()])
def test_an_exception_is_chained_and_named(function, timeout):
    with pytest.raises(RewardError, match=r"raised KeyError on 4 rows: 'gold'") as caught:
        run(function, timeout=timeout, names=["judge"])
    assert "'judge'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("function", [broken, async_broken, lambda **_: [1.0], lambda **_: 3])
def test_none_for_all_rows_of_a_failing_function(function, caplog):
    runner = RewardRunner([function, lengths], names=["judge", "lengths"], on_error="none")
    for _ in range(2):
        table = runner.run(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=IDS)
        assert np.isnan(table.values[:, 0]).all()
        assert table.values[:, 1].tolist() == [1, 2, 3, 4]
        assert table.metrics["rewards/judge/failed"] == 1.0
        assert table.metrics["rewards/lengths/failed"] == 0.0
    runner.close()
    assert sum("'judge'" in r.getMessage() for r in caplog.records) == 1


def test_only_the_rows_that_are_not_finite_count_as_none(caplog):
    table = run(lambda **_: [1.0, math.nan, 2.0, math.inf], on_error="none", names=["judge"])
    assert np.array_equal(table.values[:, 0], [1, np.nan, 2, np.nan], equal_nan=True)
    assert table.metrics["rewards/judge/failed"] == 0.5
    assert "row 1" in caplog.text


def test_a_function_that_hangs_is_left_behind():
    release = threading.Event()

    def hangs(**_):
        release.wait(30)
        return [1.0] * 4

    try:
        with pytest.raises(
            RewardError, match=r"'hangs' took longer than reward_timeout=0.05 s for 4 rows.*left behind"
        ):
            run(hangs, timeout=0.05)
        table = run([hangs, lengths], timeout=0.05, on_error="none")
        assert np.isnan(table.values[:, 0]).all()
        assert table.values[:, 1].tolist() == [1, 2, 3, 4]
        assert any(t.name == "preftune-reward-hangs" for t in threading.enumerate())
    finally:
        release.set()


def test_a_function_that_hangs_for_good_is_not_called_for_ever():
    release, calls = threading.Event(), []

    def hangs(**_):
        calls.append(1)
        release.wait(30)

    runner = RewardRunner(hangs, timeout=0.01, on_error="none")
    try:
        for _ in range(12):
            runner.run(prompts=["p"], completions=["c"], completion_ids=[[1]])
        assert len(calls) == 8
    finally:
        release.set()


def test_an_async_function_that_hangs_is_cancelled():
    cancelled = threading.Event()

    async def hangs(**_):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(RewardError, match="'hangs' took longer than reward_timeout=0.05 s.*stopped"):
        run([hangs, async_lengths], timeout=0.05)
    assert cancelled.wait(10)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_an_async_function_that_tries_to_end_the_process(error):
    """It would end the event loop, for whose answer the run waits: without a limit for ever."""

    async def ends(completions):
        raise error

    async def after(completions):
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="'ends' raised RuntimeError on 1 rows: it tried to end the process"):
        RewardRunner(ends).run(prompts=["a"], completions=["b"], completion_ids=[[1]])
    table = RewardRunner([ends, after], on_error="none").run(prompts=["a"], completions=["b"], completion_ids=[[1]])
    assert table.values[0, 1] == 1.0


def test_an_async_function_that_blocks_the_loop_does_not_block_the_run(monkeypatch):
    monkeypatch.setattr("preftune.rewards.calling._GRACE", 0.1)
    release = threading.Event()

    async def blocks(**_):
        release.wait(30)

    runner = RewardRunner([blocks, lengths], timeout=0.05, on_error="none")
    try:
        table = runner.run(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=IDS)
        assert np.isnan(table.values[:, 0]).all()
        assert table.values[:, 1].tolist() == [1, 2, 3, 4]
    finally:
        release.set()
        runner.close()


def test_a_timeout_error_of_the_function_itself_is_its_own():
    def reward(**_):
        raise TimeoutError("the judge did not answer")

    with pytest.raises(RewardError, match="raised TimeoutError on 4 rows: the judge did not answer"):
        run(reward, timeout=30.0)


# --- together, in order, without a trace ------------------------------------------------------------------------------


def test_async_functions_run_together():
    """Each waits for the other: one after another, neither would ever end."""
    here, there = asyncio.Event(), asyncio.Event()

    async def first(**_):
        here.set()
        await there.wait()
        return [1.0] * 4

    async def second(**_):
        there.set()
        await here.wait()
        return [2.0] * 4

    assert run([first, second], timeout=30.0).values[0].tolist() == [1.0, 2.0]


def test_async_functions_run_beside_plain_ones():
    plain_ran = threading.Event()

    async def waits(**_):
        while not plain_ran.is_set():
            await asyncio.sleep(0.001)
        return [1.0] * 4

    def plain(**_):
        plain_ran.set()
        return [2.0] * 4

    assert run([waits, plain], timeout=30.0).values[0].tolist() == [1.0, 2.0]


def test_async_functions_go_on_during_other_work_and_plain_ones_come_after_it():
    worked, order = threading.Event(), []

    async def waits(**_):
        while not worked.is_set():
            await asyncio.sleep(0.001)
        return [1.0] * 4

    def plain(**_):
        order.append("plain")
        return [2.0] * 4

    def work():
        order.append("work")
        worked.set()

    runner = RewardRunner([waits, plain], timeout=30.0)
    table = runner.run(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=IDS, meanwhile=work)
    assert table.values[0].tolist() == [1.0, 2.0]
    assert order == ["work", "plain"]
    runner.run(prompts=[], completions=[], completion_ids=[], meanwhile=work)
    assert order == ["work", "plain", "work"], "the work is done also where there is nothing to judge"
    runner.close()


def test_one_loop_for_all_rounds_so_that_clients_stay_usable():
    loops = set()

    async def reward(**_):
        loops.add(asyncio.get_running_loop())
        return [0.0] * 4

    runner = RewardRunner([reward, reward])
    for _ in range(2):
        runner.run(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=IDS)
    runner.close()
    assert len(loops) == 1


def test_inside_a_running_loop():
    async def main():
        return run(async_lengths)

    assert asyncio.run(main()).values[:, 0].tolist() == [1, 2, 3, 4]


def test_plain_functions_run_in_order():
    order = []

    def named(name):
        return lambda **_: order.append(name) or [0.0] * 4

    run([named("a"), named("b"), named("c")], timeout=30.0)
    run([named("d"), named("e")])
    assert order == ["a", "b", "c", "d", "e"]


def draws():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("seed", [None, 7])
def test_random_states_are_left_as_found(timeout, seed):
    def reward(**_):
        return [*draws(), 0.0]

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    wanted = draws()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    first = run(reward, timeout=timeout, seed=seed)
    assert draws() == wanted
    if seed is not None:
        assert (run(reward, timeout=timeout, seed=seed).values == first.values).all()
        assert (run(reward, timeout=timeout, seed=seed + 1).values[:3] != first.values[:3]).all()


def test_random_states_are_left_as_found_by_a_function_that_fails():
    def reward(**_):
        draws()
        raise ValueError

    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RewardError):
        run(reward)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_no_gradients(timeout):
    weight = torch.ones(1, requires_grad=True)

    def reward(completions):
        assert not (weight * 2).requires_grad
        return [1.0] * 4

    async def async_reward(completions):
        assert not (weight * 2).requires_grad
        return [1.0] * 4

    run([reward, async_reward], timeout=timeout)
    assert torch.is_grad_enabled()


# --- log_extra and log_metric -----------------------------------------------------------------------------------------


def test_extra_columns_of_one_name_are_kept_apart():
    def f(completions, log_extra, **_):
        log_extra("gold", ["f"] * 4)
        return [0.0] * 4

    def g(completions, log_extra, **_):
        log_extra("gold", ("g" for _ in range(4)))
        log_extra("own", [1, 2, 3, 4])
        return [0.0] * 4

    assert run([f, g]).columns == {"gold": ["f"] * 4, "g/gold": ["g"] * 4, "own": [1, 2, 3, 4]}


def test_a_column_used_in_some_calls_is_none_in_the_others_and_keeps_its_name():
    speaks = {"f": False, "g": True}

    def make(name):
        def reward(completions, log_extra, **_):
            if speaks[name]:
                log_extra("gold", [name] * len(completions))
            return [0.0] * len(completions)

        reward.__name__ = name
        return reward

    runner = RewardRunner([make("f"), make("g")])

    def columns():
        return runner.run(prompts=["p"], completions=["c"], completion_ids=[[1]]).columns

    assert columns() == {"gold": ["g"]}
    speaks["f"] = True
    assert columns() == {"gold": ["g"], "f/gold": ["f"]}
    speaks["g"] = False
    assert columns() == {"gold": [None], "f/gold": ["f"]}


def test_extra_column_of_another_length():
    def f(completions, log_extra, **_):
        log_extra("gold", ["x"])

    with pytest.raises(RewardError, match=r"'f' called log_extra\('gold', ...\) with 1 values; .* 4 completions"):
        run(f)


def test_metrics_are_means_and_nan_is_not_reported():
    def f(log_metric, **_):
        for value in (1, torch.tensor(3.0), np.float32(5), math.nan):
            log_metric("depth", value)
        log_metric("nothing", math.nan)
        return [0.0] * 4

    def g(log_metric, **_):
        log_metric("depth", 11)
        return [0.0] * 4

    metrics = run([f, g]).metrics
    assert metrics["depth"] == 5.0  # (1 + 3 + 5 + 11) / 4
    assert "nothing" not in metrics


@pytest.mark.parametrize("value", ["1", None, [1.0], torch.ones(2)])
def test_a_metric_that_is_no_number(value):
    def f(log_metric, **_):
        log_metric("depth", value)

    with pytest.raises(RewardError, match=r"log_metric\('depth', ...\)"):
        run(f)


@pytest.mark.parametrize("name", ["loss", "reward", "kl", "completions/mean_length", "eval_loss"])
def test_a_metric_under_a_name_of_training(name):
    def f(log_metric, **_):
        log_metric(name, 123.0)

    with pytest.raises(RewardError, match=rf"'f' called log_metric\('{name}', ...\).* take another one, such as 'f/"):
        run(f)


def test_lazy_names():
    import preftune.rewards

    for name in preftune.rewards.__all__:
        assert getattr(preftune.rewards, name) is not None
    assert set(preftune.rewards.__all__) == set(preftune.rewards._MODULE_OF)
    assert "RewardRunner" in dir(preftune.rewards)
    with pytest.raises(AttributeError, match="no attribute 'RewardRuner'"):
        _ = preftune.rewards.RewardRuner
    assert inspect.isclass(preftune.rewards.RewardRunner)
