"""Reward functions and the runner that calls them.

A reward is a function of prompts and completions that returns one number or None per completion.
"""
