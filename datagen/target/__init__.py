"""One target server: its profile, its tokens, its native API, and the proof that it is what it seems."""
