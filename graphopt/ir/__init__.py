"""Facts of the graph that every stage uses: operators, memory effects, aliases, metadata."""
