"""Evaluation: accuracy, perplexity and retrieval against length."""
