"""Batches divided into microbatches, and their results put together."""
