"""The EAGLE-3 drafter: its model, its loss, its checkpoints, and its training on captured states."""
