"""Synthetic tasks, one file each, sampled on the fly on any device."""
