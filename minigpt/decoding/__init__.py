"""Prompt ids -> drawn ids."""
