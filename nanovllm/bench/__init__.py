"""Benchmarks: programs that measure this engine, each teaching in its docstring what it measures and why."""
