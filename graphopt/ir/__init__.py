"""Facts about graphs that every stage uses: operators, memory effects, aliases, metadata."""
