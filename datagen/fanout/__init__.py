"""Many requests over many servers: queue, windows, breakers."""
