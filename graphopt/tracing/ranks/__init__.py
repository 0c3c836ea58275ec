"""Several ranks: collectives as functional ones, values that are the same on all ranks
(uniformity), inputs of which each rank holds a part."""
