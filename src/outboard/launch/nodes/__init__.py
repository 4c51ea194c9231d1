"""Engine cores on other machines.

The head's side: `desk`, `admission`, `remote`; for its clients `stall`. A node's own: `node`, `life`, `ranks`, `watch`.
"""
