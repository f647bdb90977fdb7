"""Answers of a given form: JSON by a schema, a regular expression, one of some texts, a grammar."""
