"""Adapters from tables of completions and evaluations to the experiment trackers that people use.

Each imports its library when it is built, joins the run that is open, and never stops training.
"""
