"""Starting an engine-core process, and seeing that it never outlives its front end."""
