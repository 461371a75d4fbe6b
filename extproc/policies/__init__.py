"""Policies: pure functions that choose a node from candidates."""
