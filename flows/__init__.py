"""Prefect flows: thin shells around datagen."""
