"""Prompt sources: mix, reader, normalisation, deduplication, split, plan."""
