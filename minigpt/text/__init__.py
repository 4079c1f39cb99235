"""Text to token ids and back. No torch."""
