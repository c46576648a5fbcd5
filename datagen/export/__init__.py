"""The rows of a run in the layouts that other trainers, and other people, read."""
