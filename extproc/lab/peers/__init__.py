"""`kvaffinity compare`: this router and others in real time, each before the same simulated nodes with caches."""
