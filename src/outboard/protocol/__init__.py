"""What crosses a process boundary: messages, and how they become frames."""
