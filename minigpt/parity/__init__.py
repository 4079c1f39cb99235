"""Proof on the user's own files."""
