"""The command line: `preftune sft|dpo|kto|reward|env|demo`.

Nothing here imports torch or transformers until a command really runs.
"""
