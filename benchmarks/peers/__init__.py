"""Other projects' clients on the same work, each in an environment of its own."""
