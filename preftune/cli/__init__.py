"""The command line: `preftune sft|dpo|reward|kto|grpo|rloo|sdft|sdpo|report|compare|env|demo`.

Nothing here imports torch or transformers until a command really runs.
"""
