"""The command line: a thin skin over `LLM` and the benchmarks, a sub-command a file."""
