"""Kernels for long rows in Gluon, for Hopper GPUs: the same mathematics as their namesakes one folder up."""
