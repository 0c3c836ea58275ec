"""Division of batches into microbatches, and merging of the microbatches' results."""
