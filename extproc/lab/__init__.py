"""The laboratory: the simulated node, the load generator, the demo and the benchmarks."""
