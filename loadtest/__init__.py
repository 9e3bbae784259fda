"""Load and benchmarks."""
