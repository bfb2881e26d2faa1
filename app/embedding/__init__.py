"""Embeddings: from the output of a model to a vector, and how alike two of them are."""
