"""Data parallelism: who gets a request, and how ranks that must step together agree to run and to rest.

All that decides is pure: no process, no socket, no clock. What time it is and what came over the wire are arguments.
`coordinator.py` and `step_sync.py` are the shells that bring it onto the wire.
"""
