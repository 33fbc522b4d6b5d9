"""Benchmarks, `python -m bench`: the cases, the measurement, and the files of results."""
