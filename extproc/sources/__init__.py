"""I/O that feeds the core: what the nodes say of themselves."""
