"""Engines that come along. Each imports its library in its constructor."""
