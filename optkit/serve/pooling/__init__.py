"""Endpoints that compute vectors of texts: embeddings, reranking and scores."""
