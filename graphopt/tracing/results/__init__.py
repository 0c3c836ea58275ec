"""What the results of a graph are for (the signature), and how each call makes the values that
the step returns or leaves."""
