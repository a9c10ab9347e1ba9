"""What serves the policy: a client of vLLM's wire protocol, our own server of it, a double."""
