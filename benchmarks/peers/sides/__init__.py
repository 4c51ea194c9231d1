"""The sides of a comparison, each a process. Apart: vLLM has this directory in its path, and `vllm.py` would hide it."""
