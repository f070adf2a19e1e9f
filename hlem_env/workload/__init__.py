"""Requests: where they come from and what they look like."""
