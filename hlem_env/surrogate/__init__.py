"""The fast backend: a node simulated request by request."""
