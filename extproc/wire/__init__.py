"""Pure translation between Envoy, HTTP request bodies and the vocabulary of the core."""
