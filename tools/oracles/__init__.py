"""Float64 oracles and published workloads, for tests and benchmarks."""
