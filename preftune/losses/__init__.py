"""Losses as pure functions of scores: no trainer, config object, logging or collective in here.

`names` and `importing` load no torch, so configs may import them; this file stays empty for the same reason.
"""
