"""The sides of a comparison, each a process; apart, since vLLM has this directory in its path."""
