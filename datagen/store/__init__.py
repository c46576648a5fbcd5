"""Every on-disk format, each with one owner."""
