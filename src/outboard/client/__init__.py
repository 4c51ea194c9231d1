"""Clients: what lives in the front end and talks to engine cores."""
