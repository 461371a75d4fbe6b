"""The laboratory: traces of requests, simulated nodes in virtual time, our router and others', tables and plots."""
