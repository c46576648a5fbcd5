"""Preflight: small checks of one server, each a claim that would otherwise cost a run.

`probes` asks the server a few questions, together; each check reads the evidence and gives a verdict.
"""
