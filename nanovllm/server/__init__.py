"""The HTTP server: an ASGI app that serves an engine through the OpenAI and Anthropic APIs."""
