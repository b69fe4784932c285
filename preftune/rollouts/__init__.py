"""Back ends that generate completions for online training.

They all take prompts and sampling options and return token ids with the log-probabilities they were drawn with.
"""
