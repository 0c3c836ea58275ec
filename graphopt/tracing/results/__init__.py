"""The signature of a graph's results, and recipes for the values that a step returns or stores."""
