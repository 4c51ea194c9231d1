"""The OpenAI-compatible server: API processes around `AsyncLLM`, and the supervisor that owns the engine cores."""
