"""Loading models, scoring trees of prompts and branches, and the reference model in all its forms.

Every log-probability in preftune comes from `preftune.models.logprobs.token_scores`.
"""
