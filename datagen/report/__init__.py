"""The run card: what was collected, what the drafter reaches, whether it pays, and what to do next."""
