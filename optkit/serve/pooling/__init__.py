"""Endpoints with vectors of texts: embeddings, reranking and scores."""
