"""kvaffinity: sends each LLM request to the node that already holds its KV cache."""
