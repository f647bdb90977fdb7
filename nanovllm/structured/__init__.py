"""Structured outputs: completions that follow a JSON schema, a regular expression, a list of choices or a grammar."""
