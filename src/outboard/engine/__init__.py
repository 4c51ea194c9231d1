"""The engine core's side: what an engine author writes, and the process that hosts it."""
