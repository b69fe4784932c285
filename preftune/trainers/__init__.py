"""The trainers, one file each, over `BaseTrainer` and the offline or online family.

An algorithm is a `loss` (and `advantages`); everything else is shared and final.
"""
