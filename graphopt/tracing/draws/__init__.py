"""Random numbers that a step draws from Python's and numpy's generators.

lam = np.random.beta(a, a)       ──▶  drawn before each call's graph runs, an input of it
np.sqrt(1 - lam)                 ──▶  computed then as well, by numpy
if random.random() < ratio:      ──▶  a condition, asked of what a call has drawn
Tensor(np.random.normal(…))      ──▶  a tensor, an input of the graph
"""
