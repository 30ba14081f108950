"""Upkeep of this repository."""
