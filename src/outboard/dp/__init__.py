"""Data parallelism: who gets a request, and how ranks that must step together agree to run and to rest.

Everything in here is pure: no process, no socket, no clock. What time it is and what came over the wire are arguments.
"""
