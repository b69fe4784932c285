"""The command line: `preftune sft|dpo|reward|kto|grpo|rloo|report|compare|env|demo`.

Nothing here imports torch or transformers until a command really runs.
"""
