"""A server of vLLM's token-in, token-out protocol on transformers and torch (CPU or GPU)."""
