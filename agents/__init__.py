"""Controllers that choose the next step of alpha, the embedding cache's share of the pool."""
