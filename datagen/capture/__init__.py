"""The seam through which an engine hands hidden states over. Imports nothing, like its parent."""
