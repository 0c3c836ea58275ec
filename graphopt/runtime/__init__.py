"""Running steps: bound to live tensors, agreed on by ranks, late, or not captured at all."""
