"""`preftune env`: versions, hardware and threads, for a bug report or a look at the machine.

Nothing about the user, and nothing is sent anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from preftune.errors import ConfigError


def main(words: Sequence[str] = ()) -> int:
    """Print the environment, one `name: value` a line."""
    if words and words[0] not in ("--help", "-h"):
        raise ConfigError(f"preftune env takes no options, and {words[0]!r} was given.")
    if words:
        print("usage: preftune env\n\nShow versions, hardware and threads.")
        return 0
    from preftune.callbacks.environment import environment

    for name, value in environment():
        print(f"{name}: {value}")
    return 0
