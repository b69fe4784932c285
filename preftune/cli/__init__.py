"""The command line: `preftune sft|dpo|env|demo`.

Nothing here imports torch or transformers until a command really runs.
"""
