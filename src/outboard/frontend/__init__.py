"""The front end: text in, streams of text out."""
