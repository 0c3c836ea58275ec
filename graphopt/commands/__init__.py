"""What the commands do that `graphopt.cli` declares; `graphopt demo` is in `graphopt.demo`."""
