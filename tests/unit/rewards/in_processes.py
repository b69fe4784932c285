"""Rewards that worker processes import: top-level functions, one of which never ends.

Light on imports, so that a worker starts fast.
"""

from __future__ import annotations

import os


def lengths(completions, log_extra, log_metric):
    log_extra("length", [len(c) for c in completions])
    log_metric("longest", max(map(len, completions)))
    return [float(len(c)) for c in completions]


def process_id(completions):
    return [os.getpid()] * len(completions)


def fails(completions):
    raise KeyError("gold")


class HasNoWayBack(Exception):
    def __init__(self, one, two):
        super().__init__("cannot be made again from one argument")


def fails_oddly(completions):
    raise HasNoWayBack(1, 2)


def never_ends(completions):
    while True:
        pass


def dies(completions):
    os._exit(3)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions):
        return [self.factor * len(c) for c in completions]


def slow_compare(gold, text):
    from preftune.rewards.judging import compare

    while text == "for ever":
        pass
    return compare(gold, text)
