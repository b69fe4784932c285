"""Callbacks: what moves the reference model, and what watches a run.

Those that watch never change the run; those that move the reference keep their state in the checkpoint.
"""
