"""The HTTP server: an ASGI app over an engine, in the words of the OpenAI and Anthropic APIs."""
