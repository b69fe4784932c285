"""Worker processes: what comes back, what is killed, and what cannot be sent.

Real processes, few of them: a worker starts in a tenth of a second, since it imports neither torch nor the script.
"""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from preftune.errors import ConfigError, RewardError
from preftune.rewards.base import RewardRunner
from preftune.rewards.processes import Call, Worker, call_all
from tests.unit.rewards import in_processes
from tests.unit.rewards.in_processes import Scaled, dies, fails, fails_oddly, lengths, never_ends, process_id

ROWS = {"prompts": ["p", "q"], "completions": ["a", "bbb"], "completion_ids": [[1], [2, 3]]}


@pytest.fixture
def runner(request):
    made = []

    def make(functions, **options):
        made.append(RewardRunner(functions, **{"processes": 1, "timeout": 60.0, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_values_columns_and_metrics_come_back(runner):
    rewards = runner([lengths, process_id, Scaled(2.0)])
    table = rewards.run(**ROWS)
    assert table.values[:, [0, 2]].tolist() == [[1.0, 2.0], [3.0, 6.0]]
    assert table.columns == {"length": [1, 3]}
    assert table.metrics["longest"] == 3.0
    assert table.values[0, 1] != os.getpid()
    assert rewards.run(**ROWS).values[0, 1] == table.values[0, 1], "the worker stays"
    assert table.seconds["lengths"] < 5


def test_errors_are_chained_and_the_worker_survives(runner):
    rewards = runner([fails, fails_oddly, lengths, process_id], on_error="none")
    table = rewards.run(**ROWS)
    assert np.isnan(table.values[:, :2]).all()
    assert table.values[:, 2].tolist() == [1.0, 3.0]
    assert rewards.run(**ROWS).values[0, 3] == table.values[0, 3]
    with pytest.raises(RewardError, match="'fails' raised KeyError on 2 rows: 'gold'") as caught:
        runner(fails).run(**ROWS)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in_processes.py" in caught.value.__cause__.__notes__[0]
    with pytest.raises(RewardError, match="HasNoWayBack: cannot be made again"):
        runner(fails_oddly).run(**ROWS)


def test_a_hanging_function_is_killed_and_the_next_call_works(runner):
    rewards = runner([never_ends, lengths, process_id], timeout=0.5, on_error="none")
    tables = [rewards.run(**ROWS) for _ in range(2)]
    for table in tables:
        assert np.isnan(table.values[:, 0]).all()
        assert table.values[:, 1].tolist() == [1.0, 3.0]
        assert 0.4 < table.seconds["never_ends"] < 30
    killed, after = (int(table.values[0, 2]) for table in tables)
    assert killed != after
    with pytest.raises(ProcessLookupError):
        os.kill(killed, 0)


def test_a_process_that_ends_is_an_error_and_is_started_again(runner):
    table = runner([dies, lengths], on_error="none").run(**ROWS)
    assert np.isnan(table.values[:, 0]).all()
    assert table.values[:, 1].tolist() == [1.0, 3.0]
    with pytest.raises(RewardError, match="'dies' raised RuntimeError on 2 rows: the worker process ended"):
        runner(dies).run(**ROWS)


def test_an_argument_that_cannot_be_sent(runner):
    with pytest.raises(RewardError, match="'lengths' raised"):
        runner(lengths_and_more).run(**ROWS, columns={"lock": [lambda: 0, lambda: 0]})


def lengths_and_more(completions, lock):
    return [0.0, 0.0]


lengths_and_more.__name__ = "lengths"
in_processes.lengths_and_more = lengths_and_more  # pickle looks for a function under its own name
lengths_and_more.__qualname__ = "lengths_and_more"
lengths_and_more.__module__ = in_processes.__name__


def test_functions_that_cannot_be_sent():
    with pytest.raises(ConfigError, match=r"'<lambda>' cannot be sent to a process.*top level of a module"):
        RewardRunner(lambda completions: [0.0], processes=1)

    def script(completions):
        return [0.0]

    script.__module__, script.__qualname__, script.__name__ = "__main__", "script", "script"
    import __main__

    __main__.script = script
    try:
        with pytest.raises(ConfigError, match="'script' is defined in the script that runs"):
            RewardRunner(script, processes=1)
    finally:
        del __main__.script


def test_several_workers_at_a_time_and_outcomes_in_order():
    workers = [Worker(), Worker()]
    try:
        calls = [
            Call(in_processes.process_id, ([0],)),
            Call(divmod, (7, 2)),
            Call(never_ends, ([0],)),
            Call(abs, (-3,)),
        ]
        outcomes = call_all(workers, calls, 0.5)
    finally:
        for worker in workers:
            worker.kill()
    assert [o.value for o in outcomes[1:]] == [(3, 1), None, 3]
    assert [o.killed for o in outcomes] == [False, False, True, False]


def test_a_worker_imports_no_torch():
    worker = Worker()
    try:
        (outcome,) = call_all(
            [worker], [Call(eval, ("[m in __import__('sys').modules for m in ('torch', 'numpy')]",))], 60
        )
    finally:
        worker.kill()
    assert outcome.value[0] is False


def test_factories_can_be_pickled():
    from preftune.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

    for made in (get_repetition_penalty_reward(2, -0.5), get_soft_overlong_punishment(10, 4)):
        again = pickle.loads(pickle.dumps(made))
        ids = [[1, 1, 1, 1], list(range(9))]
        assert again(completion_ids=ids) == made(completion_ids=ids)
        assert again.__name__ == made.__name__
