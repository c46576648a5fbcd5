"""Does a drafter pay? accept_len replayed and measured, its intervals, break-even, and scaling."""
