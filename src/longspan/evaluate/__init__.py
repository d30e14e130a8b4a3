"""Evaluation: accuracy against length."""
