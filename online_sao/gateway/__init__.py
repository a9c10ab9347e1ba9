"""The HTTP service: OpenAI-compatible chat, feedback, health."""
