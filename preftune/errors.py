"""The errors that preftune raises on purpose; each is also the built-in that older code catches.

Every message states what was given, what was wanted and what to do. To add one: subclass `PreftuneError` and the
built-in it replaces, say in the docstring when it is raised, and raise it as early as the mistake can be known.
"""


class PreftuneError(Exception):
    """Base of all errors raised by preftune."""


class ConfigError(PreftuneError, ValueError):
    """An option has a wrong value, or two options contradict each other."""


class DataFormatError(PreftuneError, ValueError):
    """A dataset, or one row of it, does not have the columns or values that the trainer reads."""


class ReferenceError(PreftuneError, ValueError):  # noqa: A001 - the public name of the design
    """The reference model asked for cannot exist or cannot move in this set-up."""


class CheckpointError(PreftuneError, ValueError):
    """A checkpoint is incomplete, damaged or belongs to another run."""


class RolloutError(PreftuneError, RuntimeError):
    """Generation failed or returned something that is not a rollout."""


class RewardError(PreftuneError, ValueError):
    """A reward function raised, hung, or returned values of a wrong type, number or range."""
