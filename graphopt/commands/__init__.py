"""What the commands that `graphopt.cli` declares need of torch, besides the demo."""
