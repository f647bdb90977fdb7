"""Benchmarks of this engine. The docstring of each explains what it measures and why."""
