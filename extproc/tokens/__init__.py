"""Prompts to token ids and block hashes, as the engine has them."""
